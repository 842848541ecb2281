"""Steps of products in few bits: which operands are cast, along which dims, and what is saved."""

from dataclasses import replace

import pytest
import torch
from megatron_kernels import grouped_matmul
from megatron_models import LowPrecisionConfig
from megatron_models.grouped_multiply import GroupedMultiply
from megatron_models.low_precision import held_weight
from megatron_models.low_precision import product as products
from megatron_models.low_precision.held_weight import HeldWeight
from megatron_models.low_precision.operands import pack, unpack
from megatron_models.low_precision.placement import low_precision_product
from megatron_models.low_precision.recipe import INT8
from megatron_parallel import Mesh
from megatron_parallel.sharding import collect_states
from megatron_parallel.tensor_parallel import (
    ColumnParallelLinear,
    ConstantWeights,
    WeightGradientRequest,
    multiply_matrix,
)

TENSORWISE = LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise")
DELAYED = LowPrecisionConfig(fp8_format="hybrid")
EXACT = {"fp8_wgrad": False}
RECIPES = {
    "tensorwise": TENSORWISE,
    "delayed": DELAYED,
    "blockwise": LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise"),
    "mxfp8": LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="mxfp8"),
    "nvfp4": LowPrecisionConfig(fp4_format="e2m1"),
}
X, W, DY = (21, 48), (80, 48), (21, 80)


def draw(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * scale


def layer_of(settings, **changes):
    product = replace(low_precision_product(settings), **changes)
    layer = ColumnParallelLinear(48, 80, Mesh.single(), bias=False, product=product)
    with torch.no_grad():
        layer.weight.copy_(draw(*W, scale=0.05))
    return layer


@pytest.fixture
def casts(monkeypatch):
    """Returns the casts from now on: shape, rows, columns, and whether the scale is looked for."""
    seen, cast = [], products.quantize_tensor

    def noted(x, elements, rule, scale, rows, columns, measures, **options):
        seen.append((tuple(x.shape), rows, columns, measures))
        return cast(x, elements, rule, scale, rows, columns, measures, **options)

    monkeypatch.setattr(products, "quantize_tensor", noted)
    return seen


@pytest.mark.parametrize("settings", [TENSORWISE, DELAYED], ids=["tensorwise", "delayed"])
@pytest.mark.parametrize(
    ("changes", "options", "of_input", "forward", "backward"),
    [
        (
            *({}, {}, True),
            [(X, True, True, True), (W, True, False, True)],
            [(DY, True, True, True), (W, False, True, False)],
        ),
        (
            *({}, {}, False),
            [(X, True, True, True), (W, True, False, True)],
            [(DY, False, True, True)],
        ),
        (
            *({}, {"keeps_input": True}, True),
            [(X, True, False, True), (W, True, False, True)],
            [(DY, True, True, True), (W, False, True, False), (X, False, True, False)],
        ),
        (
            *(EXACT, {}, True),
            [(X, True, False, True), (W, True, False, True)],
            [(DY, True, False, True), (W, False, True, False)],
        ),
        (*(EXACT, {}, False), [(X, True, False, True), (W, True, False, True)], []),
    ],
    ids=["all", "no gradient of the input", "kept", "exact", "exact, of the weight alone"],
)
def test_each_operand_is_cast_once_along_the_dims_of_its_products(
    casts, settings, changes, options, of_input, forward, backward
):
    """The scale of a weight or kept input is that of the forward pass."""
    layer = layer_of(replace(settings, **changes), **options)
    y = layer(draw(*X).requires_grad_(of_input))
    assert casts == forward
    casts.clear()
    y.backward(draw(*DY, scale=1e-3))
    assert casts == backward
    casts.clear()
    with torch.no_grad():
        layer(draw(*X))
    assert casts == [(X, True, False, True), (W, True, False, True)]


def test_operands_of_experts_are_cast_once_as_rows(casts):
    x, weight = draw(7, 32).requires_grad_(), draw(3, 16, 32).requires_grad_()
    multiply = GroupedMultiply(torch.tensor([3, 0, 4]), False, grouped_matmul)
    y = low_precision_product(TENSORWISE).forward(x, [weight], None, multiply)
    assert casts == [((3, 16, 32), True, False, True), ((7, 32), True, False, True)]
    casts.clear()
    y.backward(draw(7, 16))
    assert casts == [((7, 16), True, False, True), ((3, 16, 32), True, False, False)]


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_single_gradients_equal_those_of_a_backward_pass(name):
    layer = layer_of(RECIPES[name])
    x, dy = draw(*X).requires_grad_(), draw(*DY, scale=1e-3)
    dx, dw = torch.autograd.grad(layer(x), (x, layer.weight), dy)
    product, weight = low_precision_product(RECIPES[name]), layer.weight.detach()
    torch.testing.assert_close(product.dgrad(dy, [weight]), dx)
    request = WeightGradientRequest(weight.shape)
    (found,) = product.wgrad(dy, x.detach(), [weight], [request])
    torch.testing.assert_close(found, dw)
    assert product.wgrad(dy, x.detach(), [weight], [None]) == (None,)
    exact = draw(*X)  # without a gradient of the input, that of the weight stays in few bits
    (alone,) = torch.autograd.grad(layer(exact), layer.weight, dy)
    torch.testing.assert_close(alone, dw)


def test_single_gradients_cast_what_they_read(casts):
    product, weight = low_precision_product(TENSORWISE), draw(*W)
    product.dgrad(draw(*DY), [weight])
    assert casts == [(DY, True, False, True), (W, False, True, True)]
    casts.clear()
    product.wgrad(draw(*DY), draw(*X), [weight], [WeightGradientRequest(weight.shape)])
    assert casts == [(DY, False, True, True), (X, False, True, True)]


def saved(layer, x, **options):
    return layer.product.forward_saving(
        x, [layer.weight.detach()], None, multiply_matrix, **options
    )


def test_the_input_is_saved_as_the_gradient_of_the_weight_reads_it():
    x = draw(3, 7, 48)
    tensorwise, delayed = (saved(layer_of(RECIPES[n]), x)[1] for n in ("tensorwise", "delayed"))
    for found, amax in ((tensorwise, None), (delayed, x.abs().max())):
        elements, scale, _, seen = found.input
        assert elements.shape == (48, 21) and scale.numel() == 1
        assert seen == amax
        assert [each.numel() for each in found.weights] == [80 * 48, 1]
    blocks = saved(layer_of(RECIPES["mxfp8"]), x)[1]
    assert len(blocks.input) == 4 and blocks.input[0].shape == (48, 21)
    assert len(blocks.weights) == 1
    for name in RECIPES:
        assert saved(layer_of(RECIPES[name]), x, saves=False)[1].input == ()


def test_a_kept_input_is_saved_with_what_is_known_of_it():
    x = draw(3, 7, 48)
    for name, count, amax in (
        ("tensorwise", 3, None),
        ("delayed", 3, x.abs().max()),
        ("mxfp8", 1, None),
    ):
        found = saved(layer_of(RECIPES[name], keeps_input=True), x)[1].input
        assert found[0] is x and len(found) == count
        assert count == 1 or found[2] == amax


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "mxfp8"])
def test_an_input_that_is_gathered_again_is_saved_by_tokens(name, casts):
    """Bytes in the dims of the input; blocks of tokens would be cut, so it stays as it is."""
    layer, x, dy = layer_of(RECIPES[name]), draw(3, 7, 48), draw(*DY, scale=1e-3)
    y, found = saved(layer, x, by_rows=True)
    assert all(not columns for _, _, columns, _ in casts)
    expected, whole = saved(layer, x)
    assert torch.equal(y, expected)
    if name == "mxfp8":
        assert len(found.input) == 1 and found.input[0] is x
    else:
        assert found.input[0].dtype == torch.uint8 and found.input[0].shape == x.shape
        assert len(found.input) == len(whole.input) == 4
    gradient = layer.product.gradient(dy, of_input=True, of_weights=True)
    requests = [WeightGradientRequest(layer.weight.shape)]
    one, other = (layer.product.weight_gradients(gradient, s, requests)[0] for s in (found, whole))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("changes", "held", "of_input"),
    [({}, False, True), ({}, True, True), (EXACT, True, True), (EXACT, False, False)],
)
def test_magnitudes_are_those_of_the_operands(changes, held, of_input):
    layer = layer_of(replace(DELAYED, **changes))
    (state,) = collect_states([layer]).values()
    x, dy = draw(*X).requires_grad_(of_input), draw(*DY, scale=1e-3)
    if held:
        with ConstantWeights([layer]).held():
            layer(x).backward(dy)
    else:
        layer(x).backward(dy)
    seen = [float(each.detach().abs().max()) for each in (x, layer.weight, dy)]
    assert state.observed().tolist() == seen


def test_magnitudes_of_a_single_gradient_are_found_where_nothing_is_cast():
    layer = layer_of(replace(DELAYED, **EXACT))
    (state,) = collect_states([layer]).values()
    x, dy, weight = draw(*X), draw(*DY, scale=1e-3), layer.weight.detach()
    (found,) = layer.product.wgrad(dy, x, [weight], [WeightGradientRequest(weight.shape)])
    torch.testing.assert_close(found, dy.t() @ x)
    assert state.observed().tolist() == [float(each.abs().max()) for each in (x, weight, dy)]


def test_compiled_passes_find_the_observations_of_a_step():
    """Code that is compiled can add to a tensor, but not make one that outlives it."""
    layer = layer_of(DELAYED)
    (state,) = collect_states([layer]).values()
    layer.product.hold_weights()
    assert state.observed() is not state.observed()
    layer.product.hold_weights(compiled=True)
    assert state.observed() is state.observed()


@pytest.mark.parametrize("name", RECIPES)
def test_one_recipe_has_a_history(name):
    assert len(collect_states([layer_of(RECIPES[name])])) == (name == "delayed")


def test_switchback_requests_gradients_of_weights():
    assert products.LowPrecisionProduct(INT8).uses_requests


@pytest.mark.parametrize("operand", ["input", "weight", "gradient"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_way_that_is_not_asked_for_is_not_converted(name, operand):
    product = low_precision_product(RECIPES[name])
    both = product.converted(draw(32, 48), operand)
    rows = product.converted(draw(32, 48), operand, columns=False)
    columns = product.converted(draw(32, 48), operand, rows=False)
    assert both.rows is not None and both.columns is not None
    assert rows.columns is None and columns.rows is None
    missing = (None, None, None)
    assert len(both.pack()) == 7
    assert rows.pack()[3:6] == missing and rows.pack()[0] is not None
    assert columns.pack()[:3] == missing and columns.pack()[3] is not None


def test_operands_that_were_not_converted_are_refused():
    assert pack(None) == (None, None, None)
    one, form = torch.ones(2, 2), low_precision_product(RECIPES["mxfp8"]).recipe.input
    for parts in ((None, None, None), (one, None, None), (None, one, None)):
        with pytest.raises(TypeError, match="was not converted for this product"):
            unpack(parts, form, 2)


def test_a_weight_is_no_matrix_of_experts_by_default():
    product = replace(low_precision_product(TENSORWISE), held=HeldWeight())
    product.hold_weights()
    assert len(product.constant_weights([draw(*W)])) == 7  # both ways and the magnitude


@pytest.mark.parametrize(
    ("devices", "options", "compiles"),
    [
        (("cuda",), {"compiled": True}, False),
        (("cpu",), {}, False),
        (("cpu",), {"compiled": True}, True),
    ],
)
def test_conversions_are_compiled_on_request_once_for_each_owner(
    monkeypatch, devices, options, compiles
):
    calls = []

    def compiled(function, **settings):
        calls.append((function, settings))
        return lambda weight: (function(weight)[0] + 1,)

    monkeypatch.setattr(held_weight, "COMPILED_ON", devices)
    monkeypatch.setattr(torch, "compile", compiled)
    held, weight = HeldWeight(), torch.ones(2)

    def double(w):
        return (w * 2,)

    def triple(w):
        return (w * 3,)

    for convert, value in ((double, 2), (double, 2), (triple, 3)):
        held.hold(**options)
        for _ in range(2):
            assert held.of(weight, convert)[0].tolist() == [value + compiles] * 2
    fixed = {"dynamic": False}
    assert calls == ([(double, fixed), (triple, fixed)] if compiles else [])


def test_a_product_compiles_no_conversion_by_default(monkeypatch):
    monkeypatch.setattr(held_weight, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(torch, "compile", None)
    for settings in (TENSORWISE, DELAYED):
        layer = layer_of(settings)
        layer.product.hold_weights()
        assert len(layer.product.constant_weights([layer.weight])) == 7
