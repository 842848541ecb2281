"""Muon equals torch's, orthogonalizes fused weights one by one, and is the same on every rank."""

from typing import Any

import pytest
import torch
from megatron_optim import (
    MuonSettings,
    OptimError,
    Optimizer,
    OptimizerConfig,
    WidthRatio,
    build_rules,
)
from megatron_optim.matrix_groups import require_matrices
from megatron_optim.muon import orthogonalized
from megatron_parallel import (
    Mesh,
    ParallelLayout,
    Sharding,
    TrainableParameters,
)
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

LR, DECAY = 0.1, 0.2


def polar(matrix: Tensor, coefficients: object) -> Tensor:
    """Returns the iterations by their effect on singular values, in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficients:  # type: ignore[attr-defined]
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("simple", 3), ("quintic", 10), ("polar_express", 9), ("cans", 7)],
)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
def test_iterations_map_singular_values(kind: str, steps: int, shape: tuple[int, int]) -> None:
    config = MuonSettings(coefficient_type=kind, num_ns_steps=steps)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    found = orthogonalized(matrices, config.coefficients())
    for matrix, result in zip(matrices, found, strict=True):
        expected = polar(matrix, config.coefficients())
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)
    assert len(config.coefficients()) == steps
    if kind == "polar_express":
        values = torch.linalg.svdvals(found)
        assert (values - 1).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "steps", "error"),
    [("quintic", 5, 0.04), ("polar_express", 8, 1e-3), ("cans", 5, 0.13)],
)
def test_singular_values_from_a_hundredth_on_become_1(kind: str, steps: int, error: float) -> None:
    """None becomes negative. The errors are those of the coefficients, rounded up."""
    values = torch.logspace(-2, 0, 1000, dtype=torch.float64)
    for a, b, c in MuonSettings(coefficient_type=kind, num_ns_steps=steps).coefficients():
        values = a * values + b * values**3 + c * values**5
    assert (values - 1).abs().max() < error


class Products(TorchFunctionMode):
    """Records the shapes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        if function.__name__ in ("matmul", "__matmul__", "baddbmm"):
            self.shapes.append(tuple(found.shape))
        return found


@pytest.mark.parametrize("shape", [(4, 3, 7), (4, 7, 3)])
def test_iterations_multiply_a_matrix_with_its_transpose_on_the_shorter_side(
    shape: tuple[int, ...],
) -> None:
    coefficients = MuonSettings(coefficient_type="simple", num_ns_steps=2).coefficients()
    with Products() as products:
        found = orthogonalized(torch.ones(shape), coefficients)
    assert found.shape == shape
    assert products.shapes == [(4, 3, 3), (4, 3, 3), (4, 3, 7)] * 2


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("scale", "theirs"), [("shape_scaling", "original"), ("match_rms_adamw", "match_rms_adamw")]
)
def test_muon_equals_that_of_torch_in_bf16(nesterov: bool, scale: str, theirs: str) -> None:
    shapes = {"wide": (8, 24), "tall": (40, 16)}
    start = {
        n: torch.randn(s, generator=torch.Generator().manual_seed(3)) for n, s in shapes.items()
    }
    mine = {name: Parameter(tensor.clone()) for name, tensor in start.items()}
    other = {name: Parameter(tensor.clone()) for name, tensor in start.items()}
    settings = MuonSettings(
        nesterov=nesterov,
        coefficient_type="simple",
        scale_mode=scale,
        fp32_matmul_prec="medium",
    )
    table = {name: Sharding(shape) for name, shape in shapes.items()}
    ours = Optimizer(
        TrainableParameters(mine, table, Mesh.single()),
        OptimizerConfig(optimizer="muon", clip_grad=0.0, weight_decay=DECAY, settings=settings),
    )
    reference = torch.optim.Muon(
        other.values(), lr=LR, weight_decay=DECAY, nesterov=nesterov, adjust_lr_fn=theirs
    )
    for step in range(5):
        for optimizer, parameters in ((ours, mine), (reference, other)):
            optimizer.zero_grad()
            sum((p * (step + 1)).sin().sum() for p in parameters.values()).backward()
        ours.step(LR)
        reference.step()
    for name, parameter in mine.items():
        moved = (other[name] - start[name]).norm()
        # Both round every product to bf16, 8 bits, in different orders.
        assert (parameter - other[name]).norm() < 0.02 * moved, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, "momentum must lie in [0, 1), got 1.0"),
        ({"extra_scale_factor": 0.0}, "extra_scale_factor must be positive, got 0.0"),
        ({"num_ns_steps": 0}, "num_ns_steps must be at least 1, got 0"),
        ({"num_ns_steps": 6}, "which num_ns_steps 6 is not a multiple of; use 10"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimError) as caught:
        MuonSettings(**settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_muon_without_a_matrix_is_refused() -> None:
    table = {"gain": Sharding((7,)), "word": Sharding((4, 3), vocabulary=True)}
    parameters = {name: Parameter(torch.ones(cut.shape)) for name, cut in table.items()}
    trainable = TrainableParameters(parameters, table, Mesh.single())
    with pytest.raises(OptimError) as caught:
        Optimizer(trainable, OptimizerConfig(optimizer="muon"))
    assert "none of the 2 parameters is one: 'gain' has shape (7,); use adam" in str(caught.value)


@pytest.mark.parametrize(("stages", "trained"), [(2, True), (1, False)])
def test_a_stage_of_several_and_a_frozen_model_may_have_no_matrix(
    stages: int, trained: bool
) -> None:
    parameters = {"gain": Parameter(torch.ones(7), requires_grad=trained)}
    layout = ParallelLayout(pp=stages, dp=1).resolve(stages)
    trainable = TrainableParameters(parameters, {"gain": Sharding((7,))}, Mesh(layout, 0))
    require_matrices(trainable, build_rules(OptimizerConfig(optimizer="muon"))[0])


def test_only_one_scale_mode_fits_every_width() -> None:
    wide = {"tall": WidthRatio(4.0, 2.0)}
    table = {"tall": Sharding((6, 4))}

    def optimizer(mode: str) -> Optimizer:
        parameters = {"tall": Parameter(torch.ones(6, 4))}
        config = OptimizerConfig(optimizer="muon", settings=MuonSettings(scale_mode=mode))
        return Optimizer(TrainableParameters(parameters, table, Mesh.single()), config, wide)

    (group,) = optimizer("unit_rms_norm").groups
    assert group.rates(0.3, None, 0.0) == (0.3, 0.0)
    with pytest.raises(OptimError, match=r"^--muon-scale-mode spectral has no learning rates for"):
        optimizer("spectral")


def drawn(sharding: Sharding, seed: int) -> Tensor:
    return torch.randn(sharding.shape, generator=torch.Generator().manual_seed(seed))


def test_the_device_skips_and_clips_like_the_host() -> None:
    single = {"up": Sharding((2, 8, 12), fused_dim=0), "down": Sharding((12, 16))}
    weights = [{name: Parameter(drawn(single[name], 0)) for name in single} for _ in range(2)]
    config = OptimizerConfig(optimizer="muon", clip_grad=0.5, weight_decay=DECAY)
    read, unread = (
        Optimizer(TrainableParameters(each, single, Mesh.single()), config) for each in weights
    )
    unread._host_decides = False
    for factor in (1.0, torch.nan, 2.0):
        for each, optimizer in zip(weights, (read, unread), strict=True):
            optimizer.zero_grad()
            sum((w * drawn(single[n], 1)).sin().sum() * factor for n, w in each.items()).backward()
            result = optimizer.step(LR)
            assert bool(result.skipped) == (factor != factor)
    for name, weight in weights[0].items():
        assert weight.isfinite().all()
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=1e-5)
    assert unread.steps == 2 == unread.scalars()["skipped_steps"] + 1
