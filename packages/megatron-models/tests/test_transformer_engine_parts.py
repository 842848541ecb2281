"""Parts of layers by Transformer Engine: halves of operands, norms before layers, and gathers."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fake_transformer_engine
import pytest
import torch
from megatron_kernels.transformer_engine import NAME, TransformerEngineRecipe
from megatron_models import LowPrecisionConfig
from megatron_models.transformer_engine import gather
from megatron_models.transformer_engine import norm as norms
from megatron_models.transformer_engine.norm import QuantizedNorm, quantized_norm
from megatron_models.transformer_engine.product import TransformerEngineProduct
from megatron_models.transformer_engine.recipe import transformer_engine_product
from megatron_parallel import Mesh, RecomputeConfig
from megatron_parallel.sharding import collect_states
from megatron_parallel.tensor_parallel import ColumnParallelLinear, Product
from torch import Tensor, nn

RECIPES = {
    "delayed": LowPrecisionConfig(fp8_format="hybrid"),
    "delayed weights": LowPrecisionConfig(fp8_format="hybrid", fp8_wgrad=False),
    "tensorwise": LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"),
    "tensorwise weights": LowPrecisionConfig(
        fp8_format="hybrid", fp8_recipe="tensorwise", fp8_wgrad=False
    ),
    "mxfp8": LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="mxfp8"),
}
Halves = list[tuple[str, bool, bool]]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformer_engine.install(monkeypatch, on_cpu=True)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> Halves:
    """Returns operand, rows and columns of each quantizer from now on."""
    seen: Halves = []
    make = TransformerEngineRecipe.quantizer

    def noted(self: Any, operand: Any, device: Any, **options: Any) -> Any:
        seen.append((operand, options["rows"], options["columns"]))
        return make(self, operand, device, **options)

    monkeypatch.setattr(TransformerEngineRecipe, "quantizer", noted)
    return seen


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def layer_of(product: Product) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(64, 32, Mesh.single(), bias=False, product=product)
    with torch.no_grad():
        layer.weight.copy_(draw(32, 64))
    return layer


@pytest.mark.parametrize("name", RECIPES)
def test_operands_are_quantized_along_the_dims_of_their_products(name: str, halves: Halves) -> None:
    layer = layer_of(transformer_engine_product(RECIPES[name]))
    y = layer(draw(32, 64).requires_grad_())
    assert halves == [("weight", True, False), ("input", True, False)]
    halves.clear()
    y.backward(draw(32, 32))
    expected = [("weight", False, True), ("gradient", True, True), ("input", False, True)]
    if name.endswith("weights"):
        expected = [("weight", False, True), ("gradient", True, False)]
    assert halves == expected


def test_another_gradient_is_quantized_again(halves: Halves) -> None:
    layer = layer_of(transformer_engine_product(RECIPES["tensorwise"]))
    product: Any = layer.product
    dy, other = draw(32, 32), draw(32, 32, seed=1)
    product.dgrad(dy, [layer.weight])
    halves.clear()
    product.multiply_factors(other, draw(32, 64))
    assert halves == [("gradient", False, True), ("input", False, True)]
    assert product.shared.take(dy) is None


def test_products_of_one_recipe_are_equal() -> None:
    one, other = (transformer_engine_product(RECIPES["tensorwise"]) for _ in range(2))
    assert one == other and one.shared is not other.shared
    assert "shared" not in repr(one)
    assert one != transformer_engine_product(RECIPES["tensorwise weights"])


def products() -> dict[str, Any]:
    found = {name: transformer_engine_product(each) for name, each in RECIPES.items()}
    return {"plain": TransformerEngineProduct(), **found}


@pytest.mark.parametrize("name", ["plain", *RECIPES])
def test_a_matrix_is_overwritten_unless_products_are_added_to_it(name: str) -> None:
    layer = layer_of(products()[name])
    product: Any = layer.product
    dy, x, into = draw(32, 32), draw(32, 64), torch.full((32, 64), 7.0)
    alone = product.multiply_factors(dy, x)
    assert product.multiply_factors(dy, x, into) is into
    assert torch.equal(into, alone)
    product.multiply_factors(dy, x, into, first=False)
    torch.testing.assert_close(into, 2 * alone)


def test_nothing_is_observed_of_no_rows() -> None:
    layer = layer_of(transformer_engine_product(RECIPES["delayed weights"]))
    (state,) = collect_states([layer]).values()
    product: Any = layer.product
    product.multiply_factors(draw(32, 32)[:0], draw(32, 64)[:0])
    assert state.observed().tolist() == [-torch.inf, 0, -torch.inf]


@pytest.fixture
def normed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that calls a norm; it returns what was checked, and the product."""
    checked = Mock(return_value=None)
    monkeypatch.setattr(norms, "te_unsupported_reason", checked)
    monkeypatch.setattr(norms, "te_quantized_norm", lambda x, *_: x)

    def call(cut: bool, given: bool | None, *, bias: Any = None, trains: bool = True) -> Any:
        axis, weight = SimpleNamespace(group="ranks"), SimpleNamespace(requires_grad=trains)
        layer: Any = SimpleNamespace(sequence_parallel=cut, axis=axis, weight=weight)
        norm: Any = SimpleNamespace(weight="gain", bias=bias, epsilon=1e-5, zero_centered=False)
        product: Any = Mock()
        QuantizedNorm(norm, layer, product)(torch.ones(2, 4), given)
        return checked, product

    return call


@pytest.mark.parametrize(
    ("cut", "given", "group"),
    [
        (True, None, "ranks"),
        (False, None, None),
        (True, False, None),
        (False, True, "ranks"),
    ],
)
def test_ranks_with_parts_of_a_sequence_have_one_scale(
    normed: Any, cut: bool, given: bool | None, group: str | None
) -> None:
    _, product = normed(cut, given)
    product.quantizer.assert_called_once_with("input", torch.device("cpu"), rows=True, group=group)


def test_gain_and_shift_of_a_norm_have_to_be_supported(normed: Any) -> None:
    for bias, expected in ((None, ("gain",)), ("shift", ("gain", "shift"))):
        checked, _ = normed(False, None, bias=bias)
        assert checked.call_args.args[1:] == expected


@pytest.mark.parametrize(
    ("gradients", "trains", "observes"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_norm_is_observed_where_its_reader_is_trained(
    normed: Any, gradients: bool, trains: bool, observes: bool
) -> None:
    with torch.set_grad_enabled(gradients):
        _, product = normed(False, None, trains=trains)
    assert product.observe_norm.called == observes


@pytest.mark.parametrize(
    ("backend", "name", "writes"),
    [
        (NAME, "tensorwise", True),
        (NAME, "delayed", True),
        ("torch", "tensorwise", False),
        (NAME, "plain", False),
        (NAME, "tensorwise weights", False),
        (NAME, "mxfp8", False),
    ],
)
def test_norms_write_few_bits_for_layers_with_one_scale(
    backend: str, name: str, writes: bool
) -> None:
    norm: Any = SimpleNamespace(backend=backend)
    reader: Any = SimpleNamespace(input_layer=layer_of(products()[name]))
    found = quantized_norm(norm, reader)
    assert (found is not None) == writes
    if found is not None:
        assert found.writes(RecomputeConfig(), None) and found.writes(RecomputeConfig(), "mlp")
    others: list[Any] = [SimpleNamespace(), SimpleNamespace(input_layer=nn.Linear(2, 2))]
    assert all(quantized_norm(norm, other) is None for other in others)


@pytest.mark.parametrize("complete", [False, True])
def test_an_input_in_few_bits_is_gathered_by_the_library(
    monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    axis, work, whole = Mock(), None if complete else Mock(), torch.ones(4, 3)
    monkeypatch.setattr(gather, "is_quantized", lambda _: True)
    monkeypatch.setattr(gather, "te_gather", lambda *_: (whole, work))
    gathering = gather.start_gather(torch.ones(2, 3), axis)
    ((operation, counted), _) = axis.count.call_args
    assert (operation, counted.nbytes) == ("all_gather", 6)  # a byte for an element
    assert gathering.wait() is whole
    if work is not None:
        work.wait.assert_called_once_with()


def test_another_input_is_gathered_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock()
    monkeypatch.setattr(gather, "start_all_gather", start)
    x, axis = torch.ones(2, 3), Mock()
    assert gather.start_gather(x, axis) is start.return_value
    start.assert_called_once_with(x, axis)
