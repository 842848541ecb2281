"""Settings of update rules: defaults, limits, and what the settings of Muon compute."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from megatron_optim import (
    AdafactorSettings,
    AdamSettings,
    LionSettings,
    MuonSettings,
    OptimError,
    Optimizer,
    OptimizerConfig,
    StateFormatConfig,
    StateTensor,
    UnreadStep,
    WidthRatio,
    build_rules,
    check_state_formats,
    needs_matrices,
    update_rules,
)
from megatron_optim.muon import orthogonalized
from megatron_optim.name_rules import NameRules
from megatron_optim.rule_registry import UpdateRuleKind
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch.nn import Parameter

# Those of Megatron-LM, and of torch for Adafactor.
DEFAULTS = {
    AdamSettings: {"decoupled_weight_decay": True, "kernels": "torch"},
    LionSettings: {"beta1": 0.95, "beta2": 0.98},
    AdafactorSettings: {"beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "clip_threshold": 1.0},
    MuonSettings: {
        "momentum": 0.95,
        "nesterov": False,
        "num_ns_steps": 5,
        "coefficient_type": "quintic",
        "scale_mode": "spectral",
        "extra_scale_factor": 1.0,
        "split_qkv": True,
        "tp_mode": "distributed",
        "fp32_matmul_prec": None,
        "scalar_optimizer": "adam",
    },
}


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_defaults_are_those_that_are_documented(kind: type) -> None:
    assert vars(kind()) == DEFAULTS[kind]


LIMITS = [
    (LionSettings, {"beta1": 0.0, "beta2": 0.0}),
    (LionSettings, {"beta1": 0.999999, "beta2": 0.999999}),
    (AdafactorSettings, {"beta2_decay": 0.0, "eps1": 0.0, "eps2": 0.0, "clip_threshold": 1.0}),
    (AdafactorSettings, {"beta2_decay": -0.01, "eps1": 0.01, "eps2": 0.01}),
    (MuonSettings, {"momentum": 0.0, "extra_scale_factor": 1e-9}),
    (MuonSettings, {"momentum": 0.999999, "num_ns_steps": 1, "coefficient_type": "simple"}),
    (MuonSettings, {"num_ns_steps": 1, "coefficient_type": "cans"}),
]
BEYOND = [
    (LionSettings, {"beta1": -1e-9}),
    (LionSettings, {"beta2": -1e-9}),
    (AdafactorSettings, {"beta2_decay": 1e-9}),
    (AdafactorSettings, {"eps1": -1e-9}),
    (AdafactorSettings, {"eps2": -1e-9}),
    (AdafactorSettings, {"clip_threshold": 0.999}),
    (AdafactorSettings, {"clip_threshold": float("nan")}),
    (MuonSettings, {"momentum": -1e-9}),
    (MuonSettings, {"extra_scale_factor": -1.0}),
    (MuonSettings, {"num_ns_steps": 0, "coefficient_type": "simple"}),
]


@pytest.mark.parametrize(("kind", "settings"), LIMITS)
def test_the_ends_of_a_range_are_allowed(kind: Any, settings: dict[str, Any]) -> None:
    assert settings.items() <= vars(kind(**settings)).items()


@pytest.mark.parametrize(("kind", "settings"), BEYOND)
def test_what_is_just_out_of_range_is_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(OptimError, match=next(iter(settings))):
        kind(**settings)


def test_the_number_of_iterations_that_would_fit_is_named() -> None:
    for steps, fits in ((1, 5), (4, 5), (6, 10), (11, 15)):
        with pytest.raises(OptimError, match=rf"has coefficients for 5 steps.*; use {fits}$"):
            MuonSettings(num_ns_steps=steps)


def test_coefficients_are_repeated_in_a_cycle_or_from_the_last() -> None:
    def of(kind: str, steps: int) -> tuple[tuple[float, ...], ...]:
        settings = MuonSettings(coefficient_type=kind, num_ns_steps=steps)  # type: ignore[arg-type]
        return settings.coefficients()

    assert of("simple", 3) == ((3.4445, -4.775, 2.0315),) * 3  # Jordan et al. 2024
    assert of("quintic", 10) == of("quintic", 5) * 2
    for kind, given in (("polar_express", 8), ("cans", 5)):
        whole = of(kind, given)
        assert len(set(whole)) == given
        assert of(kind, 2) == whole[:2]
        assert of(kind, given + 2) == (*whole, whole[-1], whole[-1])


@pytest.mark.parametrize(
    ("mode", "scales"),
    [  # of 9 rows and 4 columns, and of 4 rows and 9 columns
        ("spectral", (3.0, 3.0)),
        ("match_rms_adamw", (0.6, 0.6)),
        ("shape_scaling", (1.5, 1.0)),
        ("unit_rms_norm", (1.5, 2 / 3)),
    ],
)
def test_the_scale_of_an_update_follows_from_the_sizes_of_the_matrix(
    mode: Any, scales: tuple[float, float]
) -> None:
    for factor in (1.0, 0.25):
        settings = MuonSettings(scale_mode=mode, extra_scale_factor=factor)
        found = settings.scale(9, 4), settings.scale(4, 9)
        assert found == pytest.approx([factor * scale for scale in scales], rel=1e-12)


def test_small_matrices_are_orthogonalized_like_large_ones_and_zeros_stay() -> None:
    generator = torch.Generator().manual_seed(2)
    matrices = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    coefficients = MuonSettings().coefficients()
    large = orthogonalized(matrices, coefficients)
    for scale in (1e-3, 1e3):
        torch.testing.assert_close(orthogonalized(matrices * scale, coefficients), large)
    assert not orthogonalized(torch.zeros(1, 3, 3), coefficients).any()


@pytest.mark.parametrize(
    ("dtype", "precision", "low"),
    [
        (torch.float32, None, False),
        (torch.bfloat16, None, True),
        (torch.bfloat16, "highest", False),
        (torch.float32, "medium", True),
        (torch.float64, "medium", False),  # bf16 iterations are for fp32 alone
    ],
)
def test_iterations_are_in_the_precision_that_is_set_or_that_of_the_model(
    dtype: torch.dtype, precision: Any, low: bool
) -> None:
    settings = MuonSettings(fp32_matmul_prec=precision)
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    parameter = Parameter(torch.zeros(6, 4, dtype=dtype))
    parameter.grad = gradient.clone()
    trainable = TrainableParameters({"a": parameter}, {"a": Sharding((6, 4))}, Mesh.single())
    optimizer = Optimizer(trainable, OptimizerConfig("muon", clip_grad=0.0, settings=settings))
    optimizer.step(1.0)
    (_, found), *_ = optimizer.main.values()
    exact = -(6**0.5) * orthogonalized(gradient.double()[None], settings.coefficients())[0]
    error = float((found.double() - exact).norm() / exact.norm())
    assert (error > 1e-4) == low and error < 0.05


def test_the_rate_of_lion_falls_with_the_inputs_as_that_of_adam() -> None:
    for name in ("lion", "adam"):
        rule = build_rules(OptimizerConfig(name))[0]
        _, factor = rule.for_width(WidthRatio(inputs=4.0, outputs=2.0))
        assert factor == 0.25


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_devices_without_fused_kernels_compute_the_same(
    name: str, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has fused kernels for this CPU, which stands for a device without them."""
    found = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr("megatron_optim.rules.FUSED_DEVICES", devices)
        own = AdamSettings(decoupled_weight_decay=decoupled) if name == "adam" else None
        config = OptimizerConfig(name, weight_decay=0.2, clip_grad=0.0, settings=own)
        parameters = {
            n: Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)) for n in "ab"
        }
        table = {n: Sharding((2, 3)) for n in "ab"}
        optimizer = Optimizer(TrainableParameters(parameters, table, Mesh.single()), config)
        for step in range(1, 4):
            for number, parameter in enumerate(parameters.values(), start=step):
                parameter.grad = (parameter.detach() * number).cos()
            optimizer.step(0.1)
        found.append(parameters)
    for each in "ab":
        torch.testing.assert_close(found[0][each], found[1][each], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "dtype", "passes"),
    [
        ("adam", torch.float32, 0),
        ("sgd", torch.float32, 0),
        ("lion", torch.float32, 1),
        ("adam", torch.float64, 1),  # divisors are float32
    ],
)
def test_kernels_that_divide_gradients_need_no_pass_to_clip_them(
    name: str, dtype: torch.dtype, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[float] = []
    monkeypatch.setattr(
        "megatron_optim.updates.scale_gradients", lambda _, factor: factors.append(factor)
    )
    parameter = Parameter(torch.ones(2, 2, dtype=dtype))
    trainable = TrainableParameters({"a": parameter}, {"a": Sharding((2, 2))}, Mesh.single())
    optimizer = Optimizer(trainable, OptimizerConfig(name, clip_grad=1.0))
    parameter.grad = torch.full((2, 2), 5.0, dtype=dtype)  # of the norm 10
    optimizer.step(0.1)
    assert factors == pytest.approx([0.1] * passes, rel=1e-3)


@pytest.mark.parametrize(
    ("decay", "dtype", "use"),
    [
        (1 - 2**-4, "fp8", "fp32 or bf16 or fp16, or a decay rate below 0.9375"),
        (1 - 2**-8, "bf16", "fp32 or fp16, or a decay rate below 0.9961"),
        (1 - 2**-11, "fp16", "fp32, or a decay rate below 0.9995"),
    ],
)
def test_a_change_of_half_a_unit_in_the_last_place_is_too_small(
    decay: float, dtype: Any, use: str
) -> None:
    formats = StateFormatConfig(use_precision_aware_optimizer=True, exp_avg_dtype=dtype)
    with pytest.raises(OptimError, match=f"use {use}$"):
        check_state_formats(OptimizerConfig(adam_beta1=decay), formats)
    check_state_formats(OptimizerConfig(adam_beta1=decay - 1e-6), formats)
    # Lion has the same state, with a decay rate of its own.
    lion = LionSettings(beta2=decay)
    with pytest.raises(OptimError, match="cannot hold a running mean"):
        check_state_formats(OptimizerConfig("lion", settings=lion), formats)


@pytest.mark.parametrize(
    "part",
    [
        *(kind() for kind in DEFAULTS),
        UpdateRuleKind("a", "for this test", "a:B"),
        StateTensor("mean"),
        UnreadStep(torch.ones(()), torch.zeros(()), None),
        NameRules((), (), ()),
    ],
    ids=lambda part: type(part).__name__,
)
def test_descriptions_of_rules_cannot_be_changed(part: Any) -> None:
    for entry in fields(part):
        with pytest.raises(FrozenInstanceError):
            setattr(part, entry.name, None)


def test_only_the_mean_of_squares_is_divided_by() -> None:
    for name, positive in (("adam", ["exp_avg_sq"]), ("lion", []), ("muon", []), ("sgd", [])):
        state = build_rules(OptimizerConfig(name))[0].state
        assert state and [each.name for each in state if each.positive] == positive


def test_muon_alone_needs_whole_matrices() -> None:
    needs = {name for name in update_rules() if needs_matrices(OptimizerConfig(name))}
    assert needs == {"muon"}
