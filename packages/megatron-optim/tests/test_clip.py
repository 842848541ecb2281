import math

import pytest
import torch
from megatron_optim import (
    OptimError,
    clip_coefficient,
    gradient_norm,
    scale_gradients,
    sum_of_squares,
)
from megatron_optim.clip import GradientNorm
from megatron_parallel import Mesh, ParallelLayout, Sharding


def shardings(tensors: dict[str, torch.Tensor]) -> dict[str, Sharding]:
    return {name: Sharding(tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.fixture
def gradients() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"a": (3, 5), "b": (4096,), "c": (4097, 3), "d": (), "e": (0,), "f": (2, 4096)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def test_norm_and_clipping_equal_torch_in_float64(
    gradients: dict[str, torch.Tensor], mesh: Mesh
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.25)

    norm = gradient_norm(gradients, shardings(gradients), mesh)
    scale_gradients(gradients.values(), float(clip_coefficient(norm, 0.25)))

    assert float(norm) == pytest.approx(expected.item(), rel=1e-14)
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-14, atol=0)


def test_infinity_norm_is_the_largest_magnitude(
    gradients: dict[str, torch.Tensor], mesh: Mesh
) -> None:
    gradients["c"][17, 1] = -123.5
    table = shardings(gradients)
    assert gradient_norm(gradients, table, mesh, norm_type=math.inf) == 123.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_one_bad_element_makes_the_norm_not_finite(
    gradients: dict[str, torch.Tensor], mesh: Mesh, value: float, norm_type: float
) -> None:
    gradients["c"][4000, 2] = value
    norm = gradient_norm(gradients, shardings(gradients), mesh, norm_type=norm_type)
    assert not math.isfinite(norm)


def test_norm_of_a_hundred_million_fp32_elements_is_right() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(10**8)
    exact = math.fsum(float(part.double().square().sum()) for part in gradient.split(10**7))
    assert sum_of_squares([gradient]).item() == pytest.approx(exact, rel=1e-6)


def test_non_contiguous_gradients_are_counted() -> None:
    gradient = torch.arange(3 * 5000, dtype=torch.float64).view(3, 5000).T
    assert sum_of_squares([gradient]).item() == pytest.approx(
        sum(k * k for k in range(15000)), rel=1e-14
    )


def test_the_clip_coefficient_equals_megatrons() -> None:
    assert clip_coefficient(torch.tensor(4.0, dtype=torch.float64), 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_coefficient(torch.tensor(0.5, dtype=torch.float64), 1.0) == 1.0
    assert clip_coefficient(torch.tensor(1.0, dtype=torch.float64), 1.0) == 1.0 / (1.0 + 1e-6)
    assert clip_coefficient(torch.tensor(4.0, dtype=torch.float64), 0.0) == 1.0


def test_the_norm_of_no_gradients_is_zero(mesh: Mesh) -> None:
    assert gradient_norm({}, {}, mesh) == 0.0
    assert gradient_norm({}, {}, mesh, norm_type=math.inf) == 0.0


def test_mistakes_are_named(gradients: dict[str, torch.Tensor], mesh: Mesh) -> None:
    with pytest.raises(OptimError, match="'a'"):
        gradient_norm(gradients, {}, mesh)
    with pytest.raises(OptimError, match="got 3"):
        gradient_norm(gradients, shardings(gradients), mesh, norm_type=3.0)


def test_the_squares_of_nothing_add_up_to_zero(mesh: Mesh) -> None:
    """A rank may have empty shards alone."""
    empty = torch.zeros(0, 3)
    for tensors in ([], [empty], [empty, empty]):
        assert sum_of_squares(tensors).item() == 0.0
    assert gradient_norm({"a": empty}, shardings({"a": empty}), mesh) == 0.0


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.0])
def test_gradients_are_multiplied_by_any_factor(factor: float) -> None:
    gradients = [torch.tensor([1.0, -3.0]), torch.tensor([[4.0]])]
    scale_gradients(gradients, factor)
    assert [each.tolist() for each in gradients] == [[factor, -3 * factor], [[4 * factor]]]
    scale_gradients([], factor)  # a rank may update nothing


def test_the_norm_of_every_step_is_that_of_its_gradients(mesh: Mesh) -> None:
    """Also if a step has other parameters than the step before."""
    given = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": torch.tensor([12.0])}
    norm = GradientNorm(shardings(given), mesh)
    for names, expected in (("ab", 5.0), ("ab", 5.0), ("abc", 13.0), ("a", 3.0)):
        assert norm({name: given[name] for name in names}, sharded=False) == expected


def test_the_second_rank_counts_its_shard_and_no_copy() -> None:
    """Collectives of an imagined mesh leave the number of this rank as it is."""
    mesh = Mesh.imagined(ParallelLayout(dp=2), rank=1)
    gradients = {"a": torch.tensor([3.0])}
    norm = GradientNorm(shardings(gradients), mesh)
    found = [float(norm(gradients, sharded=sharded)) for sharded in (False, True, False)]
    mesh.close()
    assert found == [0.0, 3.0, 0.0]
