"""Settings of optimizer and schedules: defaults, the ends of their ranges, and what is beyond."""

import math
from typing import Any

import pytest
from megatron_optim import (
    AveragesConfig,
    LearningRateSchedule,
    LossScaleConfig,
    OffloadConfig,
    OptimError,
    OptimizerConfig,
    QKClipConfig,
    SpikeConfig,
    StateFormatConfig,
    WeightDecaySchedule,
)

# Those of Megatron-LM where it has the setting.
DEFAULTS: dict[Any, dict[str, Any]] = {
    OptimizerConfig: {
        "optimizer": "adam",
        "lr": 1e-3,
        "min_lr": 0.0,
        "decoupled_lr": None,
        "decoupled_min_lr": None,
        "lr_warmup_init": 0.0,
        "lr_decay_style": "linear",
        "lr_wsd_decay_style": "exponential",
        "lr_decay_power": 1.0,
        "weight_decay": 0.01,
        "start_weight_decay": None,
        "end_weight_decay": None,
        "weight_decay_incr_style": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "sgd_momentum": 0.9,
        "lr_mult": None,
        "weight_decay_mult": None,
        "apply_wd_to_qk_layernorm": False,
        "embedding_weight_decay": True,
        "clip_grad": 1.0,
        "settings": None,
    },
    LossScaleConfig: {
        "loss_scale": None,
        "initial_loss_scale": 2**32,
        "min_loss_scale": 1.0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
    },
    SpikeConfig: {
        "skip_grad_norm": None,
        "skip_grad_norm_spike": None,
        "skip_loss_spike": None,
        "spike_window": 100,
    },
    QKClipConfig: {"qk_clip": False, "qk_clip_alpha": 0.5, "qk_clip_threshold": 100.0},
    AveragesConfig: {"ema_decay": None, "ema_evaluate": "average"},
    OffloadConfig: {
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": False,
    },
    StateFormatConfig: {
        "use_precision_aware_optimizer": False,
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
        "main_params_dtype": "fp32",
    },
}


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_defaults_are_those_that_are_documented(kind: Any) -> None:
    assert vars(kind()) == DEFAULTS[kind]


ON = {"qk_clip": True}
RATE = {"max_lr": 1.0, "decay_samples": 10}
GROWTH = {"start": 0.1, "end": 0.5, "samples": 10, "style": "linear"}
ALLOWED: list[tuple[Any, dict[str, Any]]] = [
    (OptimizerConfig, dict.fromkeys(("lr", "min_lr", "lr_warmup_init", "weight_decay"), 0.0)),
    (OptimizerConfig, {"decoupled_lr": 0.0, "decoupled_min_lr": 0.0, "clip_grad": 0.0}),
    (OptimizerConfig, dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum"), 0.0)),
    (OptimizerConfig, dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum"), 0.999999)),
    (OptimizerConfig, {"adam_eps": 1e-30}),
    (OptimizerConfig, {"lr_decay_power": 1e-3, "lr_decay_style": "polynomial"}),
    (LossScaleConfig, {"loss_scale": 2.0**126}),
    (LossScaleConfig, {"initial_loss_scale": 0.5, "min_loss_scale": 0.5}),
    (LossScaleConfig, {"loss_scale_window": 1, "hysteresis": 1}),
    (SpikeConfig, {"skip_grad_norm": 1e-9}),
    (SpikeConfig, {"skip_grad_norm_spike": 1.001, "spike_window": 1}),
    (SpikeConfig, {"skip_loss_spike": 1.001, "spike_window": 1}),
    (QKClipConfig, {**ON, "qk_clip_alpha": 0.0, "qk_clip_threshold": 1e-9}),
    (QKClipConfig, {**ON, "qk_clip_alpha": 1.0}),
    (AveragesConfig, {"ema_decay": 1e-9}),
    (AveragesConfig, {"ema_decay": 0.999999, "ema_evaluate": "trained"}),
    (OffloadConfig, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1e-9}),
    (LearningRateSchedule, {**RATE, "min_lr": 1.0, "init_lr": 1.0, "warmup_samples": 9}),
    (LearningRateSchedule, {"max_lr": 0.0, "decay_samples": 1}),
    (LearningRateSchedule, {**RATE, "decay_style": "WSD", "wsd_decay_samples": 1}),
    (WeightDecaySchedule, {"start": 0.0, "end": 0.0, "samples": 1, "style": "constant"}),
    (WeightDecaySchedule, {**GROWTH, "end": 0.1}),
]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (OptimizerConfig, {name: -1e-9}, f"{name} must not be negative")
        for name in ("lr", "min_lr", "lr_warmup_init", "weight_decay", "clip_grad")
    ),
    (OptimizerConfig, {"decoupled_lr": 1.0, "decoupled_min_lr": -1e-9}, "decoupled_min_lr must"),
    *(
        (OptimizerConfig, {name: value}, rf"{name} must lie in \[0, 1\)")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum")
        for value in (-1e-9, 1.0)
    ),
    (OptimizerConfig, {"lr_decay_power": math.inf, "lr_decay_style": "polynomial"}, "positive"),
    (OptimizerConfig, {"adam_eps": -1e-9}, "adam_eps must be positive"),
    *(
        (LossScaleConfig, {name: value}, f"{name} must be above 0")
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale")
        for value in (0.0, 2.0**127)
    ),
    *(
        (LossScaleConfig, {"loss_scale": 4.0, name: value}, f"{name} has no effect on a constant")
        for name, value in (
            ("initial_loss_scale", 8.0),
            ("min_loss_scale", 2.0),
            ("loss_scale_window", 999),
            ("hysteresis", 1),
        )
    ),
    (SpikeConfig, {"skip_grad_norm": -1.0}, "skip_grad_norm must be above 0"),
    (SpikeConfig, {"skip_grad_norm_spike": 1.0}, "skip_grad_norm_spike must be above 1"),
    (SpikeConfig, {"skip_grad_norm": 1.0, "spike_window": 101}, "has no effect without"),
    (QKClipConfig, {**ON, "qk_clip_alpha": -1e-9}, r"qk_clip_alpha must lie in \[0, 1\]"),
    (QKClipConfig, {**ON, "qk_clip_alpha": 1.001}, r"qk_clip_alpha must lie in \[0, 1\]"),
    (QKClipConfig, {**ON, "qk_clip_threshold": 0.0}, "qk_clip_threshold must be positive"),
    (QKClipConfig, {"qk_clip_alpha": 0.25}, "qk_clip_alpha 0.25 has no effect without qk_clip;"),
    (QKClipConfig, {"qk_clip_threshold": 99.0}, "qk_clip_threshold 99.0 has no effect without qk"),
    (AveragesConfig, {"ema_decay": 0.0}, "ema_decay must lie between 0 and 1, got 0.0"),
    (AveragesConfig, {"ema_decay": 1.0}, "ema_decay must lie between 0 and 1, got 1.0"),
    (AveragesConfig, {"ema_decay": 0.5, "ema_evaluate": "best"}, "use average or trained"),
    (AveragesConfig, {"ema_evaluate": "trained"}, "has no effect without ema_decay"),
    (StateFormatConfig, {"exp_avg_sq_dtype": "bf16"}, "exp_avg_sq_dtype bf16 needs use_precision"),
    (StateFormatConfig, {"main_params_dtype": "bf16"}, "main_params_dtype bf16 needs use_precis"),
    (LearningRateSchedule, {**RATE, "min_lr": -1e-9}, "min_lr"),
    (LearningRateSchedule, {**RATE, "init_lr": -1e-9}, "init_lr"),
    (LearningRateSchedule, {**RATE, "warmup_samples": -1}, "warmup_samples -1"),
    (LearningRateSchedule, {**RATE, "decay_power": math.inf}, "decay_power inf must be positive"),
    (WeightDecaySchedule, {**GROWTH, "start": -1e-9}, "must not be negative or decrease"),
    (WeightDecaySchedule, {**GROWTH, "samples": -1}, "needs at least 1 sample, got -1"),
    (WeightDecaySchedule, {**GROWTH, "style": "constant"}, "cannot change from start 0.1"),
]


@pytest.mark.parametrize(("kind", "settings"), ALLOWED)
def test_the_ends_of_a_range_are_allowed(kind: Any, settings: dict[str, Any]) -> None:
    assert settings.items() <= vars(kind(**settings)).items()


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_what_is_out_of_range_or_without_effect_is_refused(
    kind: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptimError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("settings", "skips"),
    [
        ({}, False),
        ({"skip_grad_norm": 3.0}, True),
        ({"skip_grad_norm_spike": 3.0}, True),
        ({"skip_loss_spike": 3.0}, True),
    ],
)
def test_steps_are_skipped_if_any_limit_is_set(settings: dict[str, float], skips: bool) -> None:
    assert SpikeConfig(**settings).skips == skips


def test_averages_take_the_bytes_of_fp32_if_there_are_any() -> None:
    assert (AveragesConfig().average_bytes, AveragesConfig(0.9).average_bytes) == (0, 4)


@pytest.mark.parametrize(
    ("settings", "decoupled", "highest", "lowest"),
    [
        ({}, False, 0.5, 0.1),
        ({}, True, 0.5, 0.1),
        ({"decoupled_lr": 0.25}, False, 0.5, 0.1),
        ({"decoupled_lr": 0.25}, True, 0.25, 0.1),
        ({"decoupled_lr": 0.25, "decoupled_min_lr": 0.0}, True, 0.25, 0.0),
        ({"decoupled_lr": 0.25, "decoupled_min_lr": 0.0}, False, 0.5, 0.1),
    ],
)
def test_a_decoupled_schedule_has_its_own_rates_where_they_are_set(
    settings: dict[str, float], decoupled: bool, highest: float, lowest: float
) -> None:
    config = OptimizerConfig(lr=0.5, min_lr=0.1, **settings)
    schedule = config.learning_rate_schedule(decay_samples=10, decoupled=decoupled)
    assert (schedule.at(0), schedule.at(10)) == pytest.approx((highest, lowest))
    if not decoupled:
        assert config.learning_rate_schedule(decay_samples=10) == schedule


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, (0.2, 0.2)),
        ({"start_weight_decay": 0.0}, (0.0, 0.2)),
        ({"end_weight_decay": 0.4}, (0.2, 0.4)),
        ({"start_weight_decay": 0.0, "end_weight_decay": 0.4}, (0.0, 0.4)),
    ],
)
def test_an_end_of_the_weight_decay_that_is_not_given_is_the_weight_decay(
    given: dict[str, float], ends: tuple[float, float]
) -> None:
    config = OptimizerConfig(weight_decay=0.2, weight_decay_incr_style="linear", **given)
    schedule = config.weight_decay_schedule(samples=8)
    assert (schedule.at(0), schedule.at(8)) == pytest.approx(ends)
    assert schedule.at(2) == pytest.approx(0.75 * ends[0] + 0.25 * ends[1])
