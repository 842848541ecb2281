"""Products in few bits: their numbers, histories of magnitudes, and the layers that have them."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from megatron_kernels import grouped_matmul
from megatron_models import (
    GPT,
    ConfigError,
    GPTConfig,
    LowPrecisionConfig,
    Placement,
    check_low_precision,
    describe_low_precision,
    low_precision_placement,
)
from megatron_models.grouped_multiply import GroupedMultiply
from megatron_models.low_precision.delayed import shifted_history
from megatron_models.low_precision.placement import low_precision_product
from megatron_models.low_precision.product import LowPrecisionProduct
from megatron_models.low_precision.recipe import INT8
from megatron_models.low_precision.spreading import hadamard, hashed_noise
from megatron_parallel import Mesh, initialize_parameters
from megatron_parallel.sharding import collect_states
from megatron_parallel.tensor_parallel import ColumnParallelLinear, LoRA

CONFIG = GPTConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    vocab_size=101,
    max_position_embeddings=40,
    activation="swiglu",
    normalization="RMSNorm",
)
RECIPES = {
    "delayed": LowPrecisionConfig(fp8_format="hybrid"),
    "tensorwise": LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"),
    "blockwise": LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise"),
    "mxfp8": LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="mxfp8"),
    "nvfp4": LowPrecisionConfig(fp4_format="e2m1"),
}


def draw(*shape, scale=1.0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def model_of(config, settings, dtype=torch.float64):
    placement = low_precision_placement(config, settings, Placement(Mesh.single(), dtype=dtype))
    model = GPT(config, placement)
    initialize_parameters(model, seed=1, mesh=Mesh.single())
    return model


def layer_of(settings, dtype=torch.float32):
    product = low_precision_product(settings)
    layer = ColumnParallelLinear(48, 64, Mesh.single(), product=product, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(draw(64, 48, scale=0.05))
        layer.bias.copy_(draw(64))
    return layer


def rounded(x, dtype):
    """Returns a matrix in float8 with the largest power of two as scale that clips nothing."""
    largest = torch.finfo(dtype).max
    scale = 2.0 ** torch.ceil(torch.log2(x.abs().max() / largest))
    return (x / scale).to(dtype).to(x.dtype) * scale


def test_three_products_equal_those_of_torch_casts():
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    layer = layer_of(RECIPES["tensorwise"])
    x, dy = draw(5, 7, 48).requires_grad_(), draw(5, 7, 64, scale=1e-4)
    y = layer(x)
    dx, dweight, dbias = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    rows, columns = x.detach().view(-1, 48), dy.view(-1, 64)
    left, weight, right = rounded(rows, e4m3), rounded(layer.weight, e4m3), rounded(columns, e5m2)
    torch.testing.assert_close(y.view(-1, 64), left @ weight.t() + layer.bias)
    torch.testing.assert_close(dx.view(-1, 48), right @ weight, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(dweight, right.t() @ left, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(dbias, columns.sum(0))


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_near_those_of_plain_products(name):
    tokens = torch.randint(101, (2, 33), generator=torch.Generator().manual_seed(2))
    found = []
    for settings in (LowPrecisionConfig(), RECIPES[name]):
        model = model_of(CONFIG, settings)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (plain, gradients), (loss, others) = found
    assert plain != loss
    assert float(loss) == pytest.approx(float(plain), abs=5e-3)
    for key, gradient in gradients.items():
        error = float((others[key] - gradient).norm() / gradient.norm())
        assert error < (0.6 if name == "nvfp4" else 0.25), key


def test_gradients_of_weights_in_the_model_s_precision_use_requests():
    settings = replace(RECIPES["tensorwise"], fp8_wgrad=False)
    product = low_precision_product(settings)
    assert product.uses_requests
    assert not low_precision_product(RECIPES["tensorwise"]).uses_requests
    layer, x, dy = layer_of(settings), draw(9, 48), draw(9, 64)
    (found,) = torch.autograd.grad(layer(x), layer.weight, dy)
    torch.testing.assert_close(found, dy.t() @ x)
    request = Mock(shape=layer.weight.shape)
    assert product.wgrad(dy, x, [layer.weight], [request]) == (request.return_value,)
    assert product.wgrad(dy, x, [layer.weight], [None]) == (None,)


def test_integers_of_switchback_multiply_exactly():
    product = LowPrecisionProduct(INT8)
    x = torch.tensor([[127.0, -3.0], [0.5, 0.25]])
    weight = torch.tensor([[2.0, 1.0], [0.0, -127.0]])
    # Rows have the scales 1, 0.5 / 127, 2 / 127 and 1; 1 is 63.5 of 127, rounded to 64.
    left = torch.tensor([[127.0, -3.0], [0.5, 64 * 0.5 / 127]])
    right = torch.tensor([[2.0, 64 * 2 / 127], [0.0, -127.0]])
    torch.testing.assert_close(product.forward(x, [weight]), left @ right.t())


def test_a_history_scales_the_next_step():
    layer = layer_of(replace(RECIPES["delayed"], fp8_margin=1))
    (state,) = collect_states([layer]).values()
    assert list(collect_states([layer])) == ["weight.amax_history"]
    x, dy = draw(9, 48), draw(9, 64, scale=1e-3)
    layer(x).backward(dy)
    assert not state.value.any()  # observations count after the step
    state.step()
    expected = [x.abs().max(), layer.weight.abs().max(), dy.abs().max()]
    assert state.value.flatten().tolist() == [float(each.detach()) for each in expected]
    other = draw(9, 48, scale=0.5, seed=3)
    with torch.no_grad():
        found = layer(other)
    assert state.observed().isneginf().all()  # an evaluation observes nothing
    scales = [float(each.detach()) * 2 / 448 for each in expected[:2]]
    left, right = (
        (value / scale).to(torch.float8_e4m3fn).float() * scale
        for value, scale in zip((other, layer.weight), scales, strict=True)
    )
    torch.testing.assert_close(found, left @ right.t() + layer.bias)


def test_magnitudes_above_the_history_are_clipped_and_infinities_are_found():
    layer = layer_of(RECIPES["delayed"])
    (state,) = collect_states([layer]).values()
    state.value.fill_(1.0)
    x = torch.zeros(2, 48)
    x[0, 0], x[1, 0] = 3.0, torch.inf
    with torch.no_grad():
        layer.weight.copy_(torch.eye(64, 48))
        y = layer(x) - layer.bias
    assert float(y[0, 0]) == pytest.approx(1.0)
    assert y[1].isnan().all()


def test_a_history_shifts_unless_nothing_was_observed():
    value = torch.tensor([[3.0, 2.0, 1.0], [5.0, 4.0, 3.0], [7.0, 6.0, 5.0]])
    seen = torch.tensor([9.0, -torch.inf, torch.inf], dtype=torch.float64)
    assert shifted_history(value, seen).tolist() == [[9, 3, 2], [5, 4, 3], [7, 6, 5]]
    assert shifted_history(value, seen * 0 + 0.0).nan_to_num(0).tolist() == value.tolist()


@pytest.mark.parametrize(("algorithm", "amax"), [("most_recent", 2.0), ("max", 8.0)])
def test_a_scale_follows_the_newest_or_the_largest_magnitude(algorithm, amax):
    settings = replace(RECIPES["delayed"], fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm)
    layer = layer_of(settings)
    (state,) = collect_states([layer]).values()
    state.value.copy_(torch.tensor([2.0, 8.0, 1.0]).expand(3, 3))
    found = layer.product.converted(draw(4, 48), "input").rows
    assert float(found.scales) == pytest.approx(amax / 448)


def test_the_largest_magnitude_of_all_micro_batches_is_observed():
    layer = layer_of(RECIPES["delayed"])
    (state,) = collect_states([layer]).values()
    for scale in (1.0, 5.0, 2.0):
        layer(draw(9, 48, scale=scale)).sum().backward()
    state.step()
    assert float(state.value[0, 0]) == float(draw(9, 48, scale=5.0).abs().max())


def test_outermost_layers_stay_plain():
    settings = replace(RECIPES["delayed"], first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    model = model_of(CONFIG, settings)
    numbers = {int(name.split(".")[1]) for name in collect_states([model])}
    assert numbers == {1, 2}
    assert {name.split(".")[2] for name in collect_states([model])} == {"attention", "mlp"}


def test_a_hadamard_transform_keeps_products_and_spreads_outliers():
    a, b = draw(5, 37, dtype=torch.float64), draw(4, 37, dtype=torch.float64)
    torch.testing.assert_close(hadamard(a) @ hadamard(b).t(), a @ b.t(), rtol=1e-12, atol=1e-12)
    one = torch.zeros(1, 32)
    one[0, 20] = 8.0
    assert hadamard(one)[0, 16:].abs().tolist() == [2.0] * 16
    assert not hadamard(one)[0, :16].any()


def test_noise_is_uniform_and_equal_when_computed_again():
    x = draw(300, 300)
    noise = hashed_noise(x)
    assert torch.equal(noise, hashed_noise(x))
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(noise.var()) == pytest.approx(1 / 12, abs=0.002)
    assert len(hashed_noise(torch.ones(100, 100)).unique()) > 9000
    assert not torch.equal(noise, hashed_noise(x + 1))


def test_gradients_in_fp4_are_rounded_without_bias():
    product = low_precision_product(RECIPES["nvfp4"])
    dy = draw(2, 64)
    weight = torch.eye(64)
    copies = product.dgrad(dy.repeat(400, 1), [weight])  # indices, and so the noise, differ
    nearest = low_precision_product(replace(RECIPES["nvfp4"], fp4_recipe="nvfp4-nearest"))
    fixed = nearest.dgrad(dy, [weight])
    assert float((copies.view(400, 2, 64).mean(0) - dy).norm()) < 0.35 * float((fixed - dy).norm())


def test_rows_of_no_expert_affect_neither_scales_nor_gradients():
    """Memory without values may hold anything, in the input and in the gradient of the output."""
    counts, weight = torch.tensor([3, 0, 4]), draw(3, 16, 32)
    x, dy = draw(7, 32), draw(7, 16, scale=1e-3)

    def run(garbage):
        product = low_precision_product(RECIPES["tensorwise"])
        inputs = torch.cat([x, *([garbage.expand(2, 32)] if garbage is not None else ())])
        gradient = torch.cat([dy, *([garbage.expand(2, 16)] if garbage is not None else ())])
        leaves = inputs.requires_grad_(), weight.clone().requires_grad_()
        multiply = GroupedMultiply(counts, garbage is not None, grouped_matmul)
        y = product.forward(leaves[0], [leaves[1]], None, multiply)
        dx, dweight = torch.autograd.grad(y, leaves, gradient)
        assert not y[7:].any() and not dx[7:].any()
        return y[:7].detach(), dx[:7], dweight

    expected = run(None)
    for value in (1e30, torch.nan, torch.inf):
        for found, wanted in zip(run(torch.tensor(value)), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("operand", ["input", "weight", "gradient"])
def test_gradients_alone_are_rounded_stochastically(operand):
    product = low_precision_product(RECIPES["nvfp4"])
    nearest = low_precision_product(replace(RECIPES["nvfp4"], fp4_recipe="nvfp4-nearest"))
    x = draw(32, 32)
    ways = product.converted(x, operand)
    transformed = x if operand == "weight" else hadamard(x.t()).t()
    expected = (nearest.converted(x, operand).rows, nearest.converted(transformed, operand).columns)
    for found, rounded in zip((ways.rows, ways.columns), expected, strict=True):
        assert torch.equal(found.scales, rounded.scales)
        assert torch.equal(found.elements, rounded.elements) == (operand != "gradient")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8_format": "e4m3", "fp4_format": "e2m1"}, "exclude each other"),
        ({"fp8_recipe": "mxfp8"}, "no effect without fp8_format"),
        ({"fp4_recipe": "nvfp4-nearest"}, "no effect without fp4_format"),
        ({"fp8_wgrad": False}, "fp8_wgrad has no effect without fp8_format"),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_margin": 1}, "recipe delayed"),
        ({"fp8_format": "e4m3", "fp8_amax_history_len": 0}, "at least 1"),
        ({"fp8_format": "e4m3", "num_layers_at_end_in_bf16": 2}, "first_last_layers_bf16"),
        ({"first_last_layers_bf16": True}, "fp8_format or fp4_format"),
        (
            {
                "fp8_format": "e4m3",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": -1,
            },
            "at least 0",
        ),
    ],
)
def test_contradicting_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        LowPrecisionConfig(**settings)


def test_the_backend_of_products_is_described():
    line = describe_low_precision(RECIPES["mxfp8"], "cpu", torch.bfloat16)
    assert "fp8 mxfp8 (e4m3), with the backend reference (plain torch" in line
    assert describe_low_precision(LowPrecisionConfig(), "cpu", torch.bfloat16) == ""


def test_models_and_placements_without_such_products_are_refused():
    settings = RECIPES["tensorwise"]
    experts = replace(CONFIG, num_experts=4)
    for refused, reason in (
        (RECIPES["mxfp8"], "fp8_recipe.*mxfp8.* does not cover the grouped products of experts"),
        (RECIPES["nvfp4"], "fp4_format.* does not cover the grouped products of experts"),
        (replace(settings, fp8_wgrad=False), "fp8_wgrad as false does not cover experts"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_low_precision(experts, refused)
    check_low_precision(experts, settings)
    with pytest.raises(ConfigError, match="leave none of 3 layers"):
        ends = {"num_layers_at_start_in_bf16": 2, "first_last_layers_bf16": True}
        check_low_precision(CONFIG, replace(settings, **ends))
    adapters = Placement(Mesh.single(), products={"linear_qkv": LoRA(4, 8.0)})
    with pytest.raises(ConfigError, match="products linear_qkv are not computed in fp8 tensorwise"):
        low_precision_placement(CONFIG, settings, adapters)
    assert low_precision_placement(CONFIG, LowPrecisionConfig(), adapters) is adapters
    check_low_precision(experts, LowPrecisionConfig())
