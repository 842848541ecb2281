"""Operands that are converted once: against conversions for each product, and what is saved."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron_kernels import quantize, quantized_matmul
from megatron_models import GPT, GPTConfig, LowPrecisionConfig, Placement, low_precision_placement
from megatron_models.low_precision import held_weight
from megatron_models.low_precision import product as products
from megatron_models.low_precision.held_weight import HeldWeight
from megatron_models.low_precision.placement import low_precision_product, roles_that_keep_inputs
from megatron_parallel import Mesh, RecomputeConfig, initialize_parameters
from megatron_parallel.sharding import collect_states
from megatron_parallel.tensor_parallel import ColumnParallelLinear, ConstantWeights

TENSORWISE = LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise")
DELAYED = LowPrecisionConfig(fp8_format="hybrid", fp8_amax_history_len=2)
RECIPES = {
    "tensorwise": TENSORWISE,
    "delayed": DELAYED,
    "blockwise": LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise"),
    "mxfp8": LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="mxfp8"),
    "nvfp4": LowPrecisionConfig(fp4_format="e2m1"),
}
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=101,
    max_position_embeddings=40,
    activation="swiglu",
    normalization="RMSNorm",
    add_bias_linear=False,
)
EXPERTS = replace(CONFIG, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48)


def draw(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * scale


def layer_of(settings, dtype=torch.float32, **changes):
    product = replace(low_precision_product(settings), **changes)
    layer = ColumnParallelLinear(48, 80, Mesh.single(), product=product, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(draw(80, 48, scale=0.05))
        layer.bias.zero_()
    return layer


def model_of(config, settings, dtype=torch.float64, **changes):
    placement = Placement(Mesh.single(), dtype=dtype, **changes)
    model = GPT(config, low_precision_placement(config, settings, placement))
    initialize_parameters(model, seed=1, mesh=Mesh.single())
    return model


def gradients_of(model):
    tokens = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(2))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


def converted_for_each_product(layer, x, dy):
    """What the layer computed when each product converted its operands itself."""
    recipe, weight = layer.product.recipe, layer.weight.detach()
    scales = {"input": None, "weight": None, "gradient": None}
    for name in scales:
        scale = layer.product.scale(name)
        scales[name] = scale if scale is not None and scale > 0 else None

    def cast(matrix, operand):
        form = recipe.of(operand)
        if scales[operand] is None:
            form = replace(form, scale="power_of_two")
        return quantize(matrix, form, scale=scales[operand])

    y = quantized_matmul(cast(x, "input"), cast(weight, "weight"), None, x.dtype)
    dx = quantized_matmul(cast(dy, "gradient"), cast(weight.t(), "weight"), None, x.dtype)
    dw = quantized_matmul(cast(dy.t(), "gradient"), cast(x.t(), "input"), None, x.dtype)
    return y, dx, dw


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)


def equal_but_for_order(found, expected):
    """Returns whether results differ by the order of sums only, which BLAS chooses by strides."""
    error = (found - expected).abs().max()
    return error <= 4 * torch.finfo(expected.dtype).eps * expected.abs().max()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("settings", [TENSORWISE, DELAYED], ids=["tensorwise", "delayed"])
def test_one_conversion_equals_one_for_each_product(settings, dtype, keeps):
    layer = layer_of(settings, dtype, keeps_input=keeps)
    x, dy = draw(21, 48).to(dtype), draw(21, 80, scale=1e-3).to(dtype)
    for _ in range(2):  # the second step has a history
        expected = converted_for_each_product(layer, x, dy)
        with ConstantWeights([layer]).held():
            held = run(layer, x, dy)
        for found in (held, run(layer, x, dy)):
            assert all(map(equal_but_for_order, found, expected))
        for state in collect_states([layer]).values():
            state.step()
            assert (state.value[:, 0] > 0).all()


@pytest.mark.parametrize("name", RECIPES)
def test_a_held_weight_changes_nothing_and_is_converted_once_a_step(name, monkeypatch):
    calls = []
    own = products.LowPrecisionProduct.converted

    def counted(self, matrix, operand, **wanted):
        calls.append(operand)
        return own(self, matrix, operand, **wanted)

    monkeypatch.setattr(products.LowPrecisionProduct, "converted", counted)
    layer = layer_of(RECIPES[name])
    x, dy = draw(21, 48), draw(21, 80, scale=1e-3)
    expected = run(layer, x, dy)
    assert calls == ["input", "weight", "gradient", "weight"]
    calls.clear()
    with ConstantWeights([layer]).held():
        for _ in range(3):
            assert all(map(torch.equal, run(layer, x, dy), expected))
    assert sorted(calls) == ["gradient"] * 3 + ["input"] * 3 + ["weight"]


def test_a_weight_that_changes_is_converted_again():
    layer = layer_of(TENSORWISE)
    x, dy = draw(21, 48), draw(21, 80)
    before = run(layer, x, dy)
    constant = ConstantWeights([layer])
    with constant.held():
        assert all(map(torch.equal, run(layer, x, dy), before))
        with torch.no_grad():
            layer.weight.mul_(-3)  # against the rules, but found
        inside = run(layer, x, dy)
    assert torch.equal(inside[0], converted_for_each_product(layer, x, dy)[0])
    # An optimizer's shard and a gather write memory without the parameter's version.
    flat = torch.zeros(layer.weight.numel())
    layer.weight.data = flat.view_as(layer.weight)
    for number in range(3):
        flat.copy_(draw(80, 48, scale=0.1 * (number + 1)).flatten())
        with constant.held(compiled=number == 2):
            found = run(layer, x, dy)
        assert all(map(torch.equal, found, converted_for_each_product(layer, x, dy)))
    assert not layer.product.held.tensors
    with pytest.raises(ValueError, match="inside"), constant.held():
        run(layer, x, dy)
        raise ValueError("inside")
    assert not layer.product.held.holds
    assert layer.product.held.tensors == ()


def test_a_weight_that_is_not_held_is_never_kept():
    held, weight = HeldWeight(), torch.ones(2, 2)
    assert held.of(weight, lambda x: (x,)) == ()
    held.hold()
    assert held.of(weight, lambda x: (x + 1,))[0].sum() == 8
    held.hold()
    assert held.tensors == ()


@pytest.mark.parametrize("name", RECIPES)
def test_compiled_code_converts_a_weight_to_the_same_tensors(name, monkeypatch):
    """On the CPU, without Inductor: which kernels it generates for a GPU is its own matter."""
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    monkeypatch.setattr(held_weight, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layers = [layer_of(RECIPES[name]) for _ in range(2)]
    constant = ConstantWeights(layers)
    for _ in range(2):  # the second step compiles nothing
        with constant.held():
            expected = [layer.product.constant_weights([layer.weight]) for layer in layers]
        with constant.held(compiled=True):
            found = [layer.product.held.tensors for layer in layers]
        for one, other in zip(sum(found, ()), sum(expected, ()), strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(raw(one), raw(other))
    assert len(compilations) == 1  # equal layers share the code


def raw(tensor):
    """Returns the bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def saved_bytes(layer, x):
    """Returns the bytes that the layer saves besides its weight, in few bits and as they are."""
    sizes, own = {}, {layer.weight.untyped_storage().data_ptr()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    return sum(sizes.values()), y


def test_inputs_are_saved_in_few_bits():
    x = draw(64, 48).to(torch.bfloat16).requires_grad_()
    sizes = {name: saved_bytes(layer_of(RECIPES[name], x.dtype), x)[0] for name in RECIPES}
    assert all(x.numel() <= sizes[n] <= x.numel() + 16 for n in ("tensorwise", "delayed"))
    assert sizes["mxfp8"] == x.numel() + 2 * 48  # an exponent for 32 tokens
    assert sizes["nvfp4"] == x.numel() // 2 + 4 * 48 + 4
    for changes in ({"keeps_input": True}, {"recipe": replace(_recipe(), wgrad=False)}):
        size, _ = saved_bytes(layer_of(TENSORWISE, x.dtype, **changes), x)
        assert 2 * x.numel() <= size <= 2 * x.numel() + 16
    layer = layer_of(TENSORWISE, x.dtype)
    layer.weight.requires_grad_(False)
    assert saved_bytes(layer, x)[0] <= 16  # a frozen weight needs no input


def _recipe():
    return low_precision_product(TENSORWISE).recipe


def test_inputs_stay_as_they_are_where_that_needs_less_memory():
    assert roles_that_keep_inputs(RecomputeConfig()) == {"linear_proj", "linear_kv"}
    again = RecomputeConfig(granularity="selective", modules=("layernorm",))
    assert roles_that_keep_inputs(again) >= {"linear_qkv", "linear_fc1", "linear_proj"}
    model = model_of(CONFIG, TENSORWISE)
    kept = {
        name.rpartition(".")[2]: module.product.keeps_input
        for name, module in model.named_modules()
        if isinstance(getattr(module, "product", None), products.LowPrecisionProduct)
    }
    assert kept == {"qkv": False, "out": True, "up": False, "down": False}


@pytest.mark.parametrize("modules", [None, ("core_attn", "mlp"), ("layernorm",)])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "mxfp8"])
def test_recomputed_layers_have_the_same_gradients(name, modules):
    again = (
        RecomputeConfig(granularity="full", method="uniform", num_layers=1)
        if modules is None
        else RecomputeConfig(granularity="selective", modules=modules)
    )
    loss, expected = gradients_of(model_of(CONFIG, RECIPES[name]))
    model = model_of(CONFIG, RECIPES[name], recompute=again)
    with ConstantWeights([model]).held():
        for _ in range(2):
            other, found = gradients_of(model)
            assert loss == other
            assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_experts_multiply_in_fp8(name):
    loss, plain = gradients_of(model_of(EXPERTS, LowPrecisionConfig()))
    model = model_of(EXPERTS, RECIPES[name])
    other, found = gradients_of(model)
    assert loss != other
    assert float(other) == pytest.approx(float(loss), abs=5e-3)
    for key, gradient in plain.items():
        error = float((found[key] - gradient).norm() / gradient.norm())
        assert error < 0.25, key
    with ConstantWeights([model]).held():
        again, held = gradients_of(model)
    assert again == other
    assert all(torch.equal(held[key], found[key]) for key in found)
    for number, state in enumerate(collect_states([model]).values()):
        state.step()
        assert (state.value[:, 0] > 0).all(), number


@pytest.mark.parametrize("backend", ["auto", "scaled_grouped_mm,reference"])
def test_held_experts_are_transposed_for_kernels_that_read_columns(backend):
    product = low_precision_product(TENSORWISE)
    chosen = (("quantized_grouped_matmul", backend),)
    product = replace(product, backends=chosen, held=HeldWeight(), grouped=True)
    weight = draw(3, 16, 32)
    assert product.constant_weights([weight]) == ()
    product.hold_weights()
    rows, columns, scale, amax = product.constant_weights([weight])
    assert rows.shape == (3, 16, 32) and float(amax) == float(weight.abs().max())
    torch.testing.assert_close(rows.float() * scale, weight, rtol=0.07, atol=0.01)
    assert columns.numel() == (0 if backend == "auto" else weight.numel())
    if backend != "auto":
        assert torch.equal(columns.float(), rows.float().mT)
    product.release_weights()
    assert product.constant_weights([weight]) == ()


def test_a_history_of_experts_has_the_magnitudes_of_their_rows():
    """Those of rows of no expert do not count."""
    model = model_of(EXPERTS, DELAYED)
    layer = next(m for n, m in model.named_modules() if n.endswith("experts.up"))
    (state,) = collect_states([layer]).values()
    x, dy = draw(16, 32).double(), 1e-2 * draw(16, 96).double()
    x[14:], dy[14:] = 1e3, 1e3
    layer(x.requires_grad_(), torch.tensor([3, 0, 9, 2]), True).flatten(1).backward(dy)
    state.step()
    seen = [each.detach().abs().max() for each in (x[:14], layer.weight, dy[:14])]
    assert state.value[:, 0].tolist() == pytest.approx([float(each) for each in seen], rel=1e-6)


def test_gradients_of_experts_are_those_of_the_numbers_in_fp8():
    """One layer of experts against torch in float64 on the same elements."""
    model = model_of(EXPERTS, TENSORWISE)
    layer = next(m for n, m in model.named_modules() if n.endswith("experts.up"))
    counts = torch.tensor([3, 0, 9, 2])
    x, dy = draw(16, 32).double().requires_grad_(), draw(16, 96).double()  # two rows of none
    y = layer(x, counts, True).flatten(1)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)

    def cast(t, largest, dtype):
        scale = 2.0 ** torch.ceil(torch.log2(t.detach().abs().max() / largest))
        return (t.detach() / scale).to(dtype).double() * scale

    rows = cast(x, 448, torch.float8_e4m3fn)
    weight = cast(layer.weight.flatten(1, -2), 448, torch.float8_e4m3fn)
    gradient = cast(dy, 57344, torch.float8_e5m2)
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor([3, 0, 9, 2, 2]))
    for row in range(16):
        expert = int(owner[row])
        expected = weight[expert] @ rows[row] if expert < 4 else torch.zeros(96).double()
        torch.testing.assert_close(y[row], expected)
        back = gradient[row] @ weight[expert] if expert < 4 else torch.zeros(32).double()
        torch.testing.assert_close(dx[row], back)
    for expert in range(4):
        own = owner == expert
        expected = gradient[own].t() @ rows[own]
        torch.testing.assert_close(dw[expert].flatten(0, -2), expected)
