import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_optim import (
    LearningRateSchedule,
    OptimError,
    OptimizerConfig,
    WeightDecaySchedule,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["learning_rate"]
STYLES = [key for key, value in GOLDEN.items() if isinstance(value, list) and key != "steps"]


@pytest.mark.parametrize("style", STYLES)
def test_learning_rate_equals_the_golden_numbers_to_the_last_bit(style: str) -> None:
    name, _, anneal = style.partition("(20) ")
    schedule = LearningRateSchedule(
        max_lr=GOLDEN["max"],
        min_lr=GOLDEN["min"],
        init_lr=GOLDEN["init"],
        warmup_samples=GOLDEN["warmup"],
        decay_samples=GOLDEN["decay"],
        decay_style=name,
        wsd_decay_samples=20 if anneal else None,
        wsd_decay_style=anneal or "exponential",
    )
    assert [schedule.at(n) for n in GOLDEN["steps"]] == GOLDEN[style]


def test_without_warmup_the_first_value_is_the_highest() -> None:
    for style in ("constant", "linear", "cosine", "inverse-square-root"):
        assert LearningRateSchedule(max_lr=0.5, decay_samples=10, decay_style=style).at(0) == 0.5, (
            style
        )


def test_warmup_starts_at_its_initial_value_and_meets_the_decay() -> None:
    schedule = LearningRateSchedule(
        max_lr=1.0, init_lr=0.2, warmup_samples=1000, decay_samples=3000, decay_style="cosine"
    )
    assert schedule.at(0) == 0.2
    assert schedule.at(500) == pytest.approx(0.6, abs=1e-15)
    assert schedule.at(1000) == 1.0
    assert schedule.at(2000) == pytest.approx(0.5, abs=1e-15)
    assert schedule.at(3000) == 0.0


@pytest.mark.parametrize(
    ("power", "rates"),
    [
        (1.0, [0.75, 0.5, 0.25]),
        (2.0, [0.5625, 0.25, 0.0625]),
        (0.5, [0.8660254037844386, 0.7071067811865476, 0.5]),
    ],
)
def test_polynomial_decay_equals_hand_computed_rows(power: float, rates: list[float]) -> None:
    schedule = LearningRateSchedule(
        max_lr=1.1,
        min_lr=0.1,
        warmup_samples=20,
        decay_samples=60,
        decay_style="polynomial",
        decay_power=power,
    )
    assert [schedule.at(n) for n in (30, 40, 50)] == pytest.approx(
        [0.1 + rate for rate in rates], abs=1e-15
    )
    assert schedule.at(10) == pytest.approx(0.55)
    assert (schedule.at(20), schedule.at(60), schedule.at(61)) == (1.1, 0.1, 0.1)


def test_polynomial_decay_is_linear_by_default() -> None:
    schedule = LearningRateSchedule(max_lr=1.0, decay_samples=4, decay_style="polynomial")
    assert [schedule.at(n) for n in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_weight_decay_grows_and_then_stays_constant() -> None:
    linear = WeightDecaySchedule(0.1, 0.5, 100, "linear")
    assert [linear.at(n) for n in (0, 25, 100, 101, 10**9)] == pytest.approx(
        [0.1, 0.2, 0.5, 0.5, 0.5]
    )
    cosine = WeightDecaySchedule(0.1, 0.5, 100, "cosine")
    assert cosine.at(25) == pytest.approx(0.1 + 0.4 * 0.5 * (math.cos(math.pi * 0.75) + 1))
    assert WeightDecaySchedule(0.1, 0.1, 100).at(3) == 0.1


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"min_lr": 2.0}, "min_lr 2.0"),
        ({"init_lr": 2.0}, "init_lr 2.0"),
        ({"warmup_samples": 10}, "warmup_samples 10"),
        ({"decay_samples": 0}, "decay_samples 0"),
        ({"decay_style": "cosin"}, "'cosin'"),
        ({"decay_style": "polynomial", "decay_power": 0.0}, "decay_power 0.0 must be positive"),
        ({"decay_style": "WSD"}, "wsd_decay_samples"),
        ({"decay_style": "WSD", "wsd_decay_samples": 0}, "wsd_decay_samples 0"),
        ({"decay_style": "WSD", "wsd_decay_samples": 5, "wsd_decay_style": "sqrt"}, "'sqrt'"),
    ],
)
def test_impossible_schedules_name_the_offending_value(settings: dict, names: str) -> None:
    with pytest.raises(OptimError, match=names):
        LearningRateSchedule(**{"max_lr": 1.0, "decay_samples": 10, **settings})


@pytest.mark.parametrize(
    "arguments", [(0.5, 0.1, 10, "linear"), (0.1, 0.5, 10), (0.1, 0.1, 0), (0.1, 0.1, 10, "square")]
)
def test_impossible_weight_decays_are_refused(arguments: tuple) -> None:
    with pytest.raises(OptimError):
        WeightDecaySchedule(*arguments)


def test_configuration_builds_both_schedules() -> None:
    config = OptimizerConfig(
        lr=3e-4,
        min_lr=3e-5,
        lr_warmup_init=1e-5,
        lr_decay_style="WSD",
        lr_wsd_decay_style="linear",
        weight_decay=0.1,
    )
    schedule = config.learning_rate_schedule(
        decay_samples=1000, warmup_samples=100, wsd_decay_samples=200
    )
    assert schedule.at(0) == 1e-5
    assert schedule.at(800) == 3e-4
    assert schedule.at(900) == pytest.approx((3e-4 + 3e-5) / 2)
    assert config.weight_decay_schedule(samples=1000).at(500) == 0.1
    growing = OptimizerConfig(
        start_weight_decay=0.0, end_weight_decay=0.2, weight_decay_incr_style="linear"
    )
    assert growing.weight_decay_schedule(samples=1000).at(500) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"weight_decay": -0.1},
        {"adam_beta1": 1.0},
        {"adam_eps": 0.0},
        {"clip_grad": -1.0},
        {"lr_decay_power": 0.0, "lr_decay_style": "polynomial"},
        {"lr_decay_power": 2.0},
    ],
)
def test_impossible_configurations_name_the_field(settings: dict) -> None:
    with pytest.raises(OptimError, match=next(iter(settings))):
        OptimizerConfig(**settings)


def test_schedules_and_configuration_do_not_import_torch() -> None:
    code = (
        "import sys, megatron_optim as m; m.OptimizerConfig(); "
        "m.LearningRateSchedule(max_lr=1.0, decay_samples=2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_decay_that_begins_inside_the_warm_up_takes_effect_at_its_end():
    schedule = LearningRateSchedule(
        max_lr=1.0,
        decay_samples=100,
        warmup_samples=50,
        decay_style="WSD",
        wsd_decay_samples=80,
        wsd_decay_style="linear",
    )
    rates = [schedule.at(samples) for samples in (25, 50, 60, 100, 101)]
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0])  # at 60: 1 - (60 - 20) / 80


def test_the_inverse_square_root_counts_from_one_sample_and_ends_after_the_decay() -> None:
    for warmup in (0, 1):
        schedule = LearningRateSchedule(
            max_lr=0.5,
            min_lr=0.05,
            warmup_samples=warmup,
            decay_samples=16,
            decay_style="inverse-square-root",
        )
        rates = [schedule.at(samples) for samples in (1, 4, 16, 17)]
        assert rates == [0.5, 0.25, 0.125, 0.05]
    assert schedule.at(0) == 0.0  # a warm-up of one sample
    low = LearningRateSchedule(
        max_lr=0.5, min_lr=0.2, decay_samples=16, decay_style="inverse-square-root"
    )
    assert (low.at(0), low.at(4), low.at(9)) == (0.5, 0.25, 0.2)


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.75), ("cosine", (2**0.5 / 2 + 1) / 2), ("exponential", 2 * 0.5**0.25 - 1)],
)
def test_the_decay_phase_begins_at_the_highest_rate(style: str, middle: float) -> None:
    schedule = LearningRateSchedule(
        max_lr=1.0,
        decay_samples=100,
        decay_style="WSD",
        wsd_decay_samples=40,
        wsd_decay_style=style,
    )
    assert [schedule.at(n) for n in (0, 1, 59, 60)] == [1.0] * 4
    assert schedule.at(70) == pytest.approx(middle)
    assert schedule.at(100) == pytest.approx(0.0, abs=1e-15)
