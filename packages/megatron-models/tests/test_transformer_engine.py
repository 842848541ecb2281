"""Linear layers and norms by Transformer Engine, with a plain replacement of the library."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fake_transformer_engine
import pytest
import torch
from megatron_kernels import KernelError
from megatron_kernels.transformer_engine import library
from megatron_models import (
    GPT,
    ConfigError,
    GPTConfig,
    LowPrecisionConfig,
    Placement,
    describe_low_precision,
    low_precision_placement,
    training_memory,
)
from megatron_models.components import block
from megatron_models.low_precision.placement import low_precision_product
from megatron_models.transformer_engine.product import TransformerEngineProduct
from megatron_models.transformer_engine.recipe import (
    transformer_engine_product,
    transformer_engine_recipe,
)
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    RecomputeConfig,
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.sharding import collect_states
from megatron_parallel.tensor_parallel import (
    PLAIN,
    AccumulatingProduct,
    ColumnParallelLinear,
    LinearCrossEntropy,
    Product,
)
from torch import Tensor

BACKENDS = {
    "linear": "transformer_engine",
    "rms_norm": "transformer_engine",
    "add_rms_norm": "separate",
}
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=101,
    max_position_embeddings=32,
    activation="swiglu",
    normalization="RMSNorm",
)
RECIPES = {
    "delayed": LowPrecisionConfig(fp8_format="hybrid"),
    "delayed in the model's precision": LowPrecisionConfig(fp8_format="hybrid", fp8_wgrad=False),
    "tensorwise": LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"),
    "tensorwise weights": LowPrecisionConfig(
        fp8_format="e4m3", fp8_recipe="tensorwise", fp8_wgrad=False
    ),
    "blockwise": LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise"),
    "mxfp8": LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="mxfp8"),
    "nvfp4": LowPrecisionConfig(fp4_format="e2m1", fp4_recipe="nvfp4-nearest"),
}
Gemm = Callable[..., Any]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformer_engine.install(monkeypatch, on_cpu=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the options of each product from now on, and whether it is one in few bits."""
    import transformer_engine.pytorch.cpp_extensions as extensions

    seen = list[dict[str, Any]]()

    def gemm(a: Tensor, b: Tensor, **options: Any) -> Any:
        few = isinstance(b, fake_transformer_engine.QuantizedTensor)
        seen.append({"layout": "TN", **options, "few": few})
        return fake_transformer_engine.general_gemm(a, b, **options)

    monkeypatch.setattr(extensions, "general_gemm", gemm)
    return seen


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) * scale


def layer_of(product: Product, *, bias: bool = True) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(64, (2, 48), Mesh.single(), bias=bias, dim=1, product=product)
    with torch.no_grad():
        layer.weight.copy_(draw(2, 48, 64, scale=0.1))
        if layer.bias is not None:
            layer.bias.copy_(draw(2, 48, scale=0.1))
    return layer


def gradients(layer: ColumnParallelLinear, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    leaves = [x, *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_equals_torch_in_float64(calls: Any, bias: bool) -> None:
    layer, x, dy = (
        layer_of(TransformerEngineProduct(), bias=bias),
        draw(4, 8, 64),
        draw(4, 8, 2, 48),
    )
    found = gradients(layer, x, dy)
    assert [(each["layout"], each["few"]) for each in calls] == [
        ("TN", False),
        ("NN", False),
        ("NT", False),
    ]
    exact = layer_of(PLAIN, bias=bias).double()
    for one, other in zip(found, gradients(exact, x.double(), dy.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_a_placement_chooses_the_product_for_its_backend() -> None:
    placement = Placement(Mesh.single(), backends=BACKENDS)
    assert placement.product("linear_qkv") == TransformerEngineProduct()
    assert placement.expert_product("linear_fc1") is PLAIN
    assert Placement(Mesh.single()).product("linear_qkv") is PLAIN


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_equals_the_emulation_of_its_recipe(name: str) -> None:
    """Both quantize the same operands along the same dims; histories are those of a first step."""
    settings, x, dy = RECIPES[name], draw(4, 16, 64), draw(4, 16, 2, 48, scale=1e-2)
    layers = (
        layer_of(transformer_engine_product(settings)),
        layer_of(low_precision_product(settings)),
    )
    found = [gradients(layer, x, dy) for layer in layers]
    if name.startswith("delayed"):
        for layer in layers:
            (state,) = collect_states([layer]).values()
            state.step()
        histories = [layer.get_buffer("amax_history") for layer in layers]
        torch.testing.assert_close(*histories, rtol=0, atol=0)
        assert histories[0].tolist() == [
            [x.abs().max()],
            [layer.weight.abs().max()],
            [dy.abs().max()],
        ]
        found = [gradients(layer, x, dy) for layer in layers]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    plain = gradients(layer_of(PLAIN), x, dy)
    assert not torch.allclose(found[0][0], plain[0], rtol=1e-4, atol=1e-5)


def test_a_gradient_is_quantized_once_for_both_products_and_freed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_of(transformer_engine_product(RECIPES["tensorwise"]))
    product: Any = layer.product
    quantized = list[Any]()
    few_bits = type(product).few_bits

    def counted(self: Any, matrix: Tensor, operand: str, **use: bool) -> Any:
        quantized.append((operand, *use))
        return few_bits(self, matrix, operand, **use)

    monkeypatch.setattr(type(product), "few_bits", counted)
    gradients(layer, draw(8, 64), draw(8, 2, 48))
    assert [operand for operand, *_ in quantized] == [
        *("weight", "input"),
        *("weight", "gradient"),
        "input",
    ]
    dy = draw(8, 96)
    kept = weakref.ref(product.shared)
    product.dgrad(dy, [layer.weight])
    assert product.shared._few is not None
    assert copy.deepcopy(product.shared)._few is None
    del dy  # as a split backward pass does
    assert product.shared._few is None and kept() is product.shared
    first, second = draw(8, 96), draw(8, 96, seed=1)
    product.dgrad(first, [layer.weight])
    product.dgrad(second, [layer.weight])
    del first
    assert product.shared.take(second) is not None and product.shared.take(second) is None


def test_delayed_scales_follow_margin_and_history() -> None:
    settings = LowPrecisionConfig(
        fp8_format="e4m3", fp8_margin=1, fp8_amax_history_len=3, fp8_amax_compute_algo="max"
    )
    layer = layer_of(transformer_engine_product(settings))
    product: Any = layer.product
    cpu = torch.device("cpu")
    assert product.quantizer("input", cpu, rows=True).scale == 1.0
    layer.get_buffer("amax_history")[0] = torch.tensor([2.0, 7.0, 1.0])
    assert product.quantizer("input", cpu, rows=True).scale == 448 / 14
    newest = replace(product, algorithm="most_recent")
    assert newest.quantizer("input", cpu, rows=True).scale == 448 / 4
    layer.get_buffer("amax_history")[0] = 1e-42
    assert product.quantizer("input", cpu, rows=True).scale.isfinite()


def test_an_evaluation_observes_nothing() -> None:
    layer = layer_of(transformer_engine_product(RECIPES["delayed"]))
    (state,) = collect_states([layer]).values()
    with torch.no_grad():
        layer(draw(8, 64))
    assert state.observed().isneginf().all()


@pytest.mark.parametrize("name", [None, "delayed", "tensorwise", "mxfp8"])
def test_gradients_of_weights_are_added_to_main_gradients_by_the_product(
    calls: Any, name: str | None
) -> None:
    mesh, x, dy = Mesh.single(), draw(64, 64), draw(64, 2, 48)
    product = TransformerEngineProduct()
    if name is not None:
        product = transformer_engine_product(RECIPES[name])
    found = {}
    for fused in (False, True):
        layer = layer_of(product)
        table = collect_shardings(layer)
        buffers = GradientBuffers(layer.named_parameters(), table, mesh, DataParallelConfig())
        if fused:
            assert fuse_gradient_accumulation([layer], [buffers]).fused == ("weight",)
            assert isinstance(layer.product, AccumulatingProduct)
        calls.clear()
        for number in range(2):
            buffers.begin(last=number == 1)
            layer(x * (number + 1)).backward(dy)
        buffers.finish()
        into = [each["out"] is not None for each in calls if each["layout"] == "NT"]
        added = [each["accumulate"] for each in calls if each["layout"] == "NT"]
        assert into == [fused] * 2 and added == [False, fused]
        found[fused] = {n: t.clone() for n, t in buffers.gradients().items()}
    for key, gradient in found[True].items():
        torch.testing.assert_close(gradient, found[False][key], rtol=1e-5, atol=1e-5)


def model_of(settings: LowPrecisionConfig, **options: Any) -> GPT:
    placement = Placement(Mesh.single(), **{"backends": BACKENDS, **options})
    model = GPT(CONFIG, low_precision_placement(CONFIG, settings, placement))
    initialize_parameters(model, seed=1, mesh=Mesh.single())
    return model


def step(model: GPT) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Returns loss and gradients."""
    tokens = torch.randint(101, (2, 33), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_a_model_equals_torch(calls: Any) -> None:
    loss, found = step(model_of(LowPrecisionConfig()))
    assert len(calls) == 3 * (4 * CONFIG.num_layers + 1)
    truth, expected = step(model_of(LowPrecisionConfig(), backends={}))
    torch.testing.assert_close(loss, truth)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_loss_without_logits_equals_torch(calls: Any, when: Any) -> None:
    loss = LinearCrossEntropy(gradients=when)
    found = step(model_of(LowPrecisionConfig(), vocabulary_loss=loss))
    into = [each["out"] is not None for each in calls if each["layout"] == "NT"]
    assert any(into)  # the gradient of the output layer is added up over slices
    truth = step(model_of(LowPrecisionConfig(), backends={}))
    torch.testing.assert_close(found[0], truth[0])
    for name, gradient in truth[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_norms_write_the_input_of_the_layer_after_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is that whose norms write the model's precision, which is rounded afterwards."""
    import transformer_engine_torch as kernels

    written = list[bool]()

    def rmsnorm_fwd(*args: Any) -> Any:
        written.append(args[4] is not None)
        return fake_transformer_engine.rmsnorm_fwd(*args)

    monkeypatch.setattr(kernels, "rmsnorm_fwd", rmsnorm_fwd)
    few = model_of(RECIPES[name])
    monkeypatch.setattr(block, "quantized_norm", lambda *_: None)
    separate = model_of(RECIPES[name])
    for _ in range(2):
        written.clear()
        loss, found = step(few)
        assert written == [True] * 2 * CONFIG.num_layers + [False]  # the last norm is the final one
        truth, expected = step(separate)
        torch.testing.assert_close(loss, truth, rtol=0, atol=0)
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-6, atol=0)
        states = [collect_states([model]) for model in (few, separate)]
        assert len(states[0]) == (4 * CONFIG.num_layers if name == "delayed" else 0)
        for key, state in states[0].items():
            other = states[1][key]
            state.step()
            other.step()
            torch.testing.assert_close(state.value, other.value, rtol=1e-6, atol=0)
            assert (state.value > 0).all()


@pytest.mark.parametrize("name", ["blockwise", "tensorwise weights"])
def test_norms_write_the_model_s_precision_where_kernels_do_not_quantize(name: str) -> None:
    model: Any = model_of(RECIPES[name])
    assert not model.layers["0"].quantized_norms
    step(model)


def test_norms_write_the_model_s_precision_where_the_tensor_is_taken_apart() -> None:
    model: Any = model_of(RECIPES["tensorwise"])
    few = model.layers["0"].quantized_norms["mlp"]
    assert few.writes(RecomputeConfig(), "mlp")
    assert not few.writes(RecomputeConfig("selective", modules=("layernorm",)), "mlp")
    assert not few.writes(RecomputeConfig("selective", modules=("mlp",)), "mlp")
    assert not few.writes(RecomputeConfig(cpu_offloading_num_layers=1), "mlp")
    model.layers["0"].mlp.up.num_slices = 4
    assert not few.writes(RecomputeConfig(), "mlp")


def test_recomputed_norms_write_the_model_s_precision() -> None:
    loss, expected = step(model_of(RECIPES["tensorwise"]))
    for modules in (("layernorm",), ("mlp",), ("core_attn",)):
        plan = RecomputeConfig("selective", modules=modules)
        again, found = step(model_of(RECIPES["tensorwise"], recompute=plan))
        assert torch.equal(loss, again)
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-6, atol=1e-7)


def test_outermost_layers_multiply_in_the_model_s_precision(calls: Any) -> None:
    settings = replace(
        RECIPES["tensorwise"], first_last_layers_bf16=True, num_layers_at_end_in_bf16=0
    )
    step(model_of(settings))
    assert sum(each["few"] for each in calls) == 3 * 4 * (CONFIG.num_layers - 1)


def test_what_cannot_run_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(transformer_engine_product(RECIPES["mxfp8"]))
    with pytest.raises(KernelError, match=r"mxfp8 needs rows of a multiple of 32 .* got 24 x 64"):
        layer(draw(24, 64))
    narrow = ColumnParallelLinear(
        64, 24, Mesh.single(), product=transformer_engine_product(RECIPES["tensorwise"])
    )
    with pytest.raises(KernelError, match=r"tensorwise needs .* of 16, got 32 x 24"):
        narrow(draw(32, 64))  # whose gradient has 24 columns
    layer = layer_of(TransformerEngineProduct())
    with pytest.raises(KernelError, match=r"got torch\.float32, torch\.float64"):
        layer(draw(8, 64).double())
    missing = (
        "transformer-engine is not installed (pip install megatron-kernels[transformer-engine])"
    )
    monkeypatch.setattr(library, "missing_library", lambda _: missing)
    with pytest.raises(KernelError) as error:
        layer(draw(8, 64))
    assert str(error.value) == f"linear cannot use backend transformer_engine: {missing}"
    model = model_of(RECIPES["tensorwise"])
    with pytest.raises(KernelError, match="a norm cannot use backend transformer_engine: transf"):
        step(model)


def test_a_description_names_the_library_or_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RECIPES["mxfp8"]
    assert describe_low_precision(settings, "cpu", torch.float32, BACKENDS) == (
        "linear layers multiply in fp8 mxfp8 (hybrid) by Transformer Engine, never run on a GPU by "
        "this project"
    )
    import transformer_engine.pytorch as te

    monkeypatch.setattr(te, "is_mxfp8_available", lambda return_reason: (False, "needs Blackwell"))
    with pytest.raises(ConfigError, match="mxfp8 is not supported: needs Blackwell"):
        describe_low_precision(settings, "cpu", torch.float32, BACKENDS)
    with pytest.raises(ConfigError, match="has no recipe"):
        transformer_engine_recipe(LowPrecisionConfig())


def test_experts_are_refused() -> None:
    config = replace(CONFIG, num_experts=2, moe_ffn_hidden_size=32)
    placement = Placement(Mesh.single(), backends=BACKENDS)
    with pytest.raises(ConfigError, match="experts do not multiply in fp8 tensorwise"):
        low_precision_placement(config, RECIPES["tensorwise"], placement)


def test_a_memory_estimate_counts_inputs_in_the_model_s_precision() -> None:
    def saved(**options: Any) -> Any:
        return training_memory(CONFIG, 32, 2, "bfloat16", **options)

    few = RECIPES["tensorwise"]
    assert saved(low_precision=few, backends=BACKENDS) == saved(backends=BACKENDS)
    assert saved(low_precision=few) != saved()
