"""Learning-rate and weight-decay schedules equal those of megatron-core's scheduler."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_optim import LearningRateSchedule, OptimizerConfig, WeightDecaySchedule

scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler")

STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
ANNEALINGS = ["linear", "cosine", "exponential", "minus_sqrt"]


def theirs(**settings: Any) -> Any:
    groups = [{"lr": 0.0, "weight_decay": 0.0}]
    return scheduler.OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **settings)


@pytest.mark.parametrize("style", STYLES)
def test_learning_rates_of_random_schedules_are_equal_to_the_last_bit(style: str) -> None:
    choose = random.Random(style)
    for _ in range(40):
        decay = choose.randint(2, 100_000)
        warmup = choose.choice([0, choose.randint(0, decay - 1)])
        max_lr = 10 ** choose.uniform(-5, 0)
        ours = LearningRateSchedule(
            max_lr=max_lr,
            min_lr=max_lr * choose.choice([0.0, choose.random()]),
            init_lr=max_lr * choose.choice([0.0, choose.random()]),
            warmup_samples=warmup,
            decay_samples=decay,
            decay_style=style,
            wsd_decay_samples=choose.randint(1, decay - warmup) if style == "WSD" else None,
            wsd_decay_style=choose.choice(ANNEALINGS),
        )
        reference = theirs(
            init_lr=ours.init_lr,
            max_lr=ours.max_lr,
            min_lr=ours.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=decay,
            lr_decay_style=style,
            wsd_decay_steps=ours.wsd_decay_samples,
            lr_wsd_decay_style=ours.wsd_decay_style,
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=decay,
            wd_incr_style="constant",
        )
        edges = [0, 1, warmup, warmup + 1, decay - 1, decay, decay + 1, 2 * decay]
        for samples in edges + [choose.randint(0, decay) for _ in range(40)]:
            reference.num_steps = samples
            assert ours.at(samples) == reference.get_lr({}), (ours, samples)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decays_are_equal_to_the_last_bit(style: str) -> None:
    choose = random.Random(style)
    for _ in range(40):
        start = choose.random()
        end = start if style == "constant" else start + choose.random()
        length = choose.randint(1, 100_000)
        ours = WeightDecaySchedule(start, end, length, style)
        reference = theirs(
            init_lr=0.0,
            max_lr=1.0,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            start_wd=start,
            end_wd=end,
            wd_incr_steps=length,
            wd_incr_style=style,
        )
        for samples in [0, 1, length, length + 1] + [choose.randint(0, length) for _ in range(40)]:
            reference.num_steps = samples
            assert ours.at(samples) == reference.get_wd(), (ours, samples)


@pytest.mark.parametrize("lowest", [None, 2e-3])
def test_decoupled_learning_rates_are_equal_to_the_last_bit(lowest: float | None) -> None:
    core = pytest.importorskip("megatron.core.optimizer")
    rates = {"lr": 1e-2, "min_lr": 1e-3, "decoupled_lr": 5e-3, "decoupled_min_lr": lowest}
    overrides = core.get_standard_config_overrides(core.AdamOptimizerConfig(**rates))
    (override,) = (found for found in overrides.values() if "max_lr" in found)
    reference = theirs(
        init_lr=4e-4,
        max_lr=rates["lr"],
        min_lr=rates["min_lr"],
        lr_warmup_steps=7,
        lr_decay_steps=40,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    config = OptimizerConfig(**rates, lr_warmup_init=4e-4, lr_decay_style="cosine")
    for decoupled, group in ((True, override), (False, {})):
        lengths = {"warmup_samples": 7, "decay_samples": 40, "decoupled": decoupled}
        ours = config.learning_rate_schedule(**lengths)
        for samples in range(45):
            reference.num_steps = samples
            assert ours.at(samples) == reference.get_lr(group)
