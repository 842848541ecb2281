"""Layers without communication: their defaults, specs, products and losses on one rank."""

from functools import partial
from typing import Any

import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    LayoutError,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from megatron_parallel.extensions import Section
from megatron_parallel.tensor_parallel import (
    IGNORE_INDEX,
    PLAIN,
    ColumnSpec,
    LinearCrossEntropy,
    LoRA,
    LoRAConfig,
    OutputLayer,
    PlainProduct,
    Product,
    ProductKind,
    ReplicatedLinear,
    ReplicatedSpec,
    RowSpec,
    VocabSpec,
    WeightGradientRequest,
    added_parameter_names,
    freeze_all_but_adapters,
    merged_parameters,
    overlap_forward,
)
from torch import Tensor, nn
from torch.nn import functional

SECOND = Mesh(ParallelLayout(tp=2, dp=1), 1)
LORA = LoRA(rank=2, alpha=6.0)


def filled(layer: nn.Module) -> Any:
    """Returns the layer with numbers in all parameters, zeros nowhere."""
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return layer


def test_layers_have_a_bias_and_no_sequence_parallelism_by_default() -> None:
    column = ColumnParallelLinear(3, (4, 2), SECOND)
    row, whole = RowParallelLinear(4, 5, SECOND), ReplicatedLinear(3, 5, SECOND)
    words = VocabParallelEmbedding(6, 3, SECOND)
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
        for layer in (column, row, whole, words)
    ]
    assert shapes == [
        {"weight": (2, 2, 3), "bias": (2, 2)},
        {"weight": (5, 2), "bias": (5,)},
        {"weight": (5, 3), "bias": (5,)},
        {"weight": (3, 3)},
    ]
    assert not any(each.sequence_parallel for each in (column, row, words))
    assert all(each.partial is None for each in (*row.sharding.values(), *whole.sharding.values()))
    assert column.product is row.product is whole.product is PLAIN and words.product is None


def test_specs_build_the_layers_and_shardings_that_they_describe() -> None:
    specs = ColumnSpec(3, (4, 2), role="a"), RowSpec(4, 5, role="b"), ReplicatedSpec(3, 5, role="c")
    kinds = ColumnParallelLinear, RowParallelLinear, ReplicatedLinear
    for kind, spec in zip(kinds, specs, strict=True):
        assert "role" not in spec.arguments()
        layer = kind.from_spec(spec, SECOND)  # type: ignore[attr-defined]
        assert layer.sharding == spec.shardings() and layer.bias is not None
        cut = kind.from_spec(spec, SECOND, sequence_parallel=True, device="meta")  # type: ignore[attr-defined]
        assert cut.sharding == spec.shardings(True) and cut.weight.is_meta
    partial_over = [each.partial for each in ReplicatedSpec(3, 5).shardings(True).values()]
    assert partial_over == ["tp", "tp"]
    assert [each.weight_decay for each in ReplicatedSpec(3, 5).shardings().values()] == [
        True,
        False,
    ]
    padded, plain = (ColumnSpec(3, (5,), padded=each).shardings() for each in (8, None))
    assert padded["weight"].vocabulary and not plain["weight"].vocabulary
    assert VocabSpec(6, 3).shardings()["weight"].vocabulary
    words = VocabParallelEmbedding.from_spec(VocabSpec(6, 3), SECOND, sequence_parallel=True)
    assert words.sequence_parallel and words.sharding["weight"].shape == (6, 3)


def test_a_layer_can_leave_the_bias_to_its_caller(single: Mesh) -> None:
    layer, x = filled(ColumnParallelLinear(3, (2, 2), single)), torch.rand(5, 3)
    torch.testing.assert_close(layer(x, adds_bias=False) + layer.bias, layer(x))
    assert layer(x, adds_bias=False).shape == (5, 2, 2)
    without = filled(ReplicatedLinear(3, 2, single, bias=False))
    torch.testing.assert_close(without(x), x @ without.weight.t())
    assert without.extra_repr() == "(2, 3)"


def test_a_loss_gets_the_output_layer_in_one_slice_by_default() -> None:
    seen: list[OutputLayer] = []

    def loss(x: Tensor, layer: OutputLayer) -> Tensor:
        seen.append(layer)
        return x

    words, x, bias = VocabParallelEmbedding(6, 3, SECOND), torch.ones(2, 3), torch.ones(3)
    assert words.output(x, loss=loss) is x
    words.product = LORA
    words.output(x, 3, sequence_parallel=True, loss=loss, bias=bias)
    head = ColumnParallelLinear(3, 6, SECOND, product=LORA, sequence_parallel=True)
    assert head(x, loss=loss) is x
    axis, weights = SECOND.axis("tp"), (head.weight, head.lora_a, head.lora_b)
    assert seen[0] == OutputLayer((words.weight,), axis, False, 1, PLAIN, None)
    assert seen[1][1:5] == (axis, True, 3, LORA) and seen[1].bias is bias
    assert seen[2] == OutputLayer(weights, axis, True, 1, LORA, head.bias)


def test_layers_that_communicate_use_four_slices_if_asked_to_overlap() -> None:
    layers = nn.ModuleList(
        [ColumnParallelLinear(2, 2, SECOND), RowParallelLinear(2, 2, SECOND), nn.Linear(2, 2)]
    )
    overlap_forward(layers)
    assert [getattr(layer, "num_slices", None) for layer in layers] == [4, 4, None]


def test_negative_label_smoothing_is_refused(single: Mesh) -> None:
    with pytest.raises(LayoutError, match=r"label_smoothing -0.5 is not in 0 <= e < 1"):
        vocab_parallel_cross_entropy(
            torch.zeros(1, 3), torch.tensor([1]), single.axis("tp"), 3, label_smoothing=-0.5
        )


class Recorded(PlainProduct):
    """A plain product that records its results."""

    def __init__(self) -> None:
        object.__setattr__(self, "results", [])

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        y = super().forward(x, *arguments, **options)
        self.results.append(y.detach())  # type: ignore[attr-defined]
        return y


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(100, [100]), (513, [256, 256, 1]), (4096, [256] * 16), (4097, [257] * 15 + [242])],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_slice_has_a_sixteenth_of_the_tokens_and_at_least_256(
    single: Mesh, tokens: int, sizes: list[int], bias: bool
) -> None:
    """The logits of each slice take the memory of those before."""
    product = Recorded()
    head = filled(ColumnParallelLinear(2, 3, single, bias=bias, product=product))
    targets = torch.zeros(tokens, 1, dtype=torch.int64)
    x = torch.ones(tokens, 1, 2)
    losses = head(x, loss=partial(LinearCrossEntropy(), targets=targets, true_vocab=3))
    results: list[Tensor] = product.results  # type: ignore[attr-defined]
    assert [len(logits) for logits in results] == sizes
    assert len({logits.data_ptr() for logits in results}) == 1
    logits = functional.linear(x.flatten(0, 1), head.weight, head.bias)
    expected = functional.cross_entropy(logits, targets[:, 0])
    torch.testing.assert_close(losses, expected.expand(tokens, 1))


@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("product", [PLAIN, LORA], ids=["plain", "lora"])
def test_both_halves_of_a_backward_pass_have_the_gradients_of_torch(
    single: Mesh, product: Product, gradients: str
) -> None:
    """A token without a label may have any gradient of its loss."""
    head = filled(ColumnParallelLinear(2, 5, single, product=product, dtype=torch.float64))
    x = torch.rand(6, 1, 2, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0], [2], [IGNORE_INDEX], [1], [IGNORE_INDEX], [4]])
    upstream = torch.tensor([[3.0], [3.0], [50.0], [3.0], [-7.0], [3.0]], dtype=torch.float64)
    leaves = [x, *head.parameters()]
    plain = functional.cross_entropy(head(x).flatten(0, 1), targets[:, 0], reduction="none")
    wanted = torch.autograd.grad(plain, leaves, upstream[:, 0])
    loss = partial(LinearCrossEntropy(2, gradients), targets=targets, true_vocab=5)
    losses = head(x, loss=loss)
    torch.testing.assert_close(losses[:, 0], plain)
    (dx,) = torch.autograd.grad(losses, [x], upstream, retain_graph=True)
    found = (dx, *torch.autograd.grad(losses, leaves[1:], upstream))
    torch.testing.assert_close(found, wanted)


def test_adapters_of_experts_merge_into_the_weight_of_each_expert() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 2, 5, 4), (3, 2, 4), (3, 2, 5, 2))
    )
    merged = LORA.merged_weight((weight, a, b))
    for expert in range(3):
        for half in range(2):
            expected = weight[expert, half] + 6.0 / 2 * b[expert, half] @ a[expert]
            torch.testing.assert_close(merged[expert, half], expected)
    flat = LORA.merged_weight((weight[0], a[0], b[0]))
    torch.testing.assert_close(flat, merged[0])
    assert PLAIN.merged_weight((weight,)) is weight


def test_a_layer_alone_and_in_a_model_has_the_names_of_its_parameters(single: Mesh) -> None:
    layer = filled(RowParallelLinear(3, 2, single, product=LORA))
    assert added_parameter_names(layer) == {"lora_a", "lora_b"}
    model = nn.ModuleDict({"first": layer, "other": nn.Linear(2, 2)})
    assert added_parameter_names(model) == {"first.lora_a", "first.lora_b"}
    merged = {"weight": layer.weight + 3.0 * layer.lora_b @ layer.lora_a, "bias": layer.bias}
    torch.testing.assert_close(merged_parameters(layer), merged)
    found = merged_parameters(model)
    assert found.keys() == {"first.weight", "first.bias", "other.weight", "other.bias"}
    torch.testing.assert_close(found["first.weight"], merged["weight"])


def test_a_stage_without_an_adapter_is_frozen_too(single: Mesh) -> None:
    stage = nn.ModuleList([RowParallelLinear(3, 2, single), nn.Linear(2, 2)])
    adapted = RowParallelLinear(3, 2, single, product=LORA)
    assert freeze_all_but_adapters([stage, adapted], [PLAIN, LORA]) is True
    assert not any(parameter.requires_grad for parameter in stage.parameters())
    trained = [name for name, each in adapted.named_parameters() if each.requires_grad]
    assert trained == ["lora_a", "lora_b"]
    assert freeze_all_but_adapters([adapted], [PLAIN]) is False


def test_the_smallest_adapter_is_accepted_and_the_default_one_is_documented() -> None:
    assert LoRAConfig(1, 0.25).rank == 1
    layers = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert LoRAConfig() == LoRAConfig(8, 16.0, layers)


def test_a_request_returns_the_product_of_its_factors_in_the_shape_of_the_weight() -> None:
    request = WeightGradientRequest(torch.Size((2, 1, 3)))
    assert request.must_return
    dy, x = torch.rand(4, 2), torch.rand(4, 3)
    torch.testing.assert_close(request(dy, x), (dy.t() @ x).view(2, 1, 3))
    assert not WeightGradientRequest(torch.Size((2, 3)), lambda: False).must_return


def plain_products() -> dict[str, PlainProduct]:
    return {"linear_proj": PLAIN}


HERE = f"{LoRAConfig.__module__.rpartition('.')[0]}.lora"


def test_a_kind_of_products_is_built_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron_parallel.tensor_parallel.lora as lora

    monkeypatch.setattr(lora, "plain_products", plain_products, raising=False)
    without = ProductKind("plain", "no settings", f"{HERE}:plain_products")
    assert without.build() == without.build(LoRAConfig()) == plain_products()
    section = Section("lora", LoRAConfig, "adapters")
    kind = ProductKind("own", "settings", f"{HERE}:lora_products", section)
    assert kind.build()["linear_fc1"] == LoRA(8, 16.0)
    assert kind.build(LoRAConfig(2, 6.0, ("linear_qkv",))) == {"linear_qkv": LORA}
    for target in (f"{HERE}:absent", "megatron_parallel.absent:products"):
        with pytest.raises(LayoutError, match=rf"'broken' are built by {target}, which cannot be"):
            ProductKind("broken", "missing", target).build()


def test_initial_values_of_a_whole_weight_are_those_of_a_cut_one() -> None:
    whole = ReplicatedLinear(3, 4, SECOND)
    alone = RowParallelLinear(3, 4, Mesh.single())
    initialize_parameters(whole, seed=1, mesh=SECOND)
    initialize_parameters(alone, seed=1, mesh=Mesh.single())
    assert torch.equal(whole.weight, alone.weight) and not whole.bias.any()
