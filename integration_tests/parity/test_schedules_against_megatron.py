"""Learning-rate and weight-decay schedules equal those of megatron-core's scheduler."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
            wsd_decay_samples=choose.randint(1, decay) if style == "WSD" else None,
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


@pytest.mark.parametrize(
    ("style", "annealing"),
    [*((style, "linear") for style in STYLES[:-1]), *(("WSD", each) for each in ANNEALINGS)],
)
def test_every_step_of_ten_thousand_is_equal_to_the_last_bit(style: str, annealing: str) -> None:
    batch, steps = 24, 10_000
    config = OptimizerConfig(
        lr=3e-4,
        min_lr=2.7e-5,
        lr_warmup_init=1e-6,
        lr_decay_style=style,
        lr_wsd_decay_style=annealing,
        start_weight_decay=0.03,
        end_weight_decay=0.1,
        weight_decay_incr_style="cosine",
    )
    lengths = {"warmup": 700 * batch, "decay": 9_300 * batch, "annealing": 1_900 * batch}
    rate = config.learning_rate_schedule(
        warmup_samples=lengths["warmup"],
        decay_samples=lengths["decay"],
        wsd_decay_samples=lengths["annealing"],
    )
    decay = config.weight_decay_schedule(samples=steps * batch)
    reference = theirs(
        init_lr=1e-6,
        max_lr=3e-4,
        min_lr=2.7e-5,
        lr_warmup_steps=lengths["warmup"],
        lr_decay_steps=lengths["decay"],
        lr_decay_style=style,
        wsd_decay_steps=lengths["annealing"],
        lr_wsd_decay_style=annealing,
        start_wd=0.03,
        end_wd=0.1,
        wd_incr_steps=steps * batch,
        wd_incr_style="cosine",
    )
    (group,) = reference.optimizer.param_groups
    for step in range(steps):
        assert rate.at(step * batch) == group["lr"], step
        assert decay.at(step * batch) == group["weight_decay"], step
        reference.step(batch)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.5])
def test_polynomial_decay_equals_that_of_transformers(power: float) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    highest, lowest, warmup, end = 2e-3, 1e-4, 300, 10_000
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=highest)
    reference = optimization.get_polynomial_decay_schedule_with_warmup(
        optimizer, warmup, end, lr_end=lowest, power=power
    )
    config = OptimizerConfig(
        lr=highest, min_lr=lowest, lr_decay_style="polynomial", lr_decay_power=power
    )
    ours = config.learning_rate_schedule(decay_samples=end, warmup_samples=warmup)
    optimizer.step()
    for step in range(end + 2):
        assert ours.at(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-11), step
        reference.step()


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
