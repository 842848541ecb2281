"""Products of layers: gradients by autograd and by `dgrad` and `wgrad`."""

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    DataParallelConfig,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    Sharding,
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.sharding import Init, initialize
from megatron_parallel.tensor_parallel import (
    PLAIN,
    AccumulatingProduct,
    LoRA,
    LoRAConfig,
    Product,
    ReplicatedLinear,
    WeightGradientRequest,
    Weights,
    find_product,
    freeze_all_but_adapters,
    merged_parameters,
    overlap_forward,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

H, F, ROWS = 8, 12, 8


class Scaled:
    """`(x W^T) * g` with a factor `g` per output: a product that adds a vector."""

    is_adapter = False

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        outputs, last = weight.shape[:-1], len(weight.shape) - 1
        if weight.dim == last:
            own = Sharding(outputs, init=Init("uniform", 1.0), partial=weight.axis)
        else:
            how: Any = {"fused_dim": weight.fused_dim, "init": Init("uniform", 1.0)}
            own = Sharding(outputs, weight.axis, weight.dim, **how)
        return {"factor": own}

    def forward(
        self, x: Tensor, weights: Weights, bias: Any = None, multiply: Any = None
    ) -> Tensor:
        y = PLAIN.forward(x, weights[:1]) * weights[1].flatten()
        return y if bias is None else y + bias

    def dgrad(self, dy: Tensor, weights: Weights) -> Tensor:
        return PLAIN.dgrad(dy * weights[1].flatten(), weights[:1])

    def wgrad(
        self,
        dy: Tensor,
        x: Tensor,
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        own = None
        if requests[1]:
            own = (dy * PLAIN.forward(x, weights[:1])).sum(0).view_as(weights[1])
        scaled = dy * weights[1].flatten()
        return *PLAIN.wgrad(scaled, x, weights[:1], requests[:1]), own

    def merged_weight(self, weights: Weights) -> Tensor:
        return weights[0] * weights[1].unsqueeze(-1)


LORA = LoRA(rank=3, alpha=5.0)


class Pair(nn.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self, mesh: Mesh, product: Product, cut: bool, chunks: int) -> None:
        super().__init__()
        how: Any = {"product": product, "sequence_parallel": cut, "dtype": torch.float64}
        how["init"] = Init("normal", 0.5)
        self.up = ColumnParallelLinear(H, (2, F), mesh, dim=1, fused_dim=0, **how)
        self.down = RowParallelLinear(F, H, mesh, **how)
        overlap_forward(self, chunks)
        initialize_parameters(self, seed=1, mesh=mesh)
        table = collect_shardings(self)
        for name, parameter in self.named_parameters():  # zeros would hide the other factor
            where: Any = {"name": name, "sharding": table[name], "mesh": mesh}
            if table[name].init.kind == "constant":
                initialize(parameter, seed=2, init=Init("normal", 0.5), **where)
        freeze_all_but_adapters([self], [self.up.product])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).unbind(-2)
        return self.down(gate.sigmoid() * up)


def data() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 1, H, generator=generator, dtype=torch.float64)


def step(mesh: Mesh, product: Product, cut: bool, chunks: int, fused: bool) -> dict[str, Any]:
    """Returns global boxes of gradients, the input gradient, and the fused parameters."""
    model = Pair(mesh, product, cut, chunks)
    table = collect_shardings(model)
    buffers = GradientBuffers(model.named_parameters(), table, mesh, DataParallelConfig())
    names = fuse_gradient_accumulation([model], [buffers]).fused if fused else ()
    tp = mesh.axis("tp")
    x = (data().chunk(tp.size)[tp.index] if cut else data()).clone().requires_grad_()
    for number in range(2):
        buffers.begin(last=number == 1)
        model(x).square().sum().backward()
    buffers.finish()
    found: dict[str, Any] = {"x": (None, x.grad), "fused": names}
    for name, gradient in buffers.gradients().items():
        found[name] = [
            (p.box, gradient[p.local.slices].clone()) for p in table[name].shard_boxes(mesh)
        ]
    return found


FUSED = {
    "scaled": ("up.weight", "down.weight"),
    "lora": ("up.lora_a", "up.lora_b", "down.lora_a", "down.lora_b"),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("cut", "chunks"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("name", FUSED)
def test_ranks_have_the_gradients_of_one_rank(
    worker_pool: WorkerPool, single: Mesh, name: str, cut: bool, chunks: int, fused: bool
) -> None:
    product = LORA if name == "lora" else Scaled()
    truth = step(single, product, False, 1, False)
    layout = ParallelLayout(tp=2, dp=1)
    for found in worker_pool.run_mesh(layout, step, product, cut, chunks, fused):
        assert found.pop("fused") == (FUSED[name] if fused else ())
        assert found.keys() == truth.keys() - {"fused"}
        for weight in truth.keys() - {"x", "fused"}:
            for box, gradient in found[weight]:
                whole = truth[weight][0][1][box.slices]
                torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-12)


class Alone(nn.Module):
    """A layer whose weight is whole on every rank."""

    def __init__(self, mesh: Mesh, cut: bool) -> None:
        super().__init__()
        how: Any = {"sequence_parallel": cut, "dtype": torch.float64}
        self.layer = ReplicatedLinear(H, F, mesh, product=LORA, init=Init("normal", 0.5), **how)
        initialize_parameters(self, seed=1, mesh=mesh)
        torch.nn.init.constant_(self.layer.lora_b, 0.5)  # zeros would hide the other factor
        freeze_all_but_adapters([self], [LORA])


def step_alone(mesh: Mesh, cut: bool, fused: bool) -> dict[str, Tensor]:
    """Returns the gradients of the adapter of `Alone`."""
    model, tp = Alone(mesh, cut), mesh.axis("tp")
    table = collect_shardings(model)
    buffers = GradientBuffers(model.named_parameters(), table, mesh, DataParallelConfig())
    if fused:
        assert len(fuse_gradient_accumulation([model], [buffers]).fused) == 2
    buffers.begin(last=True)
    x = data().chunk(tp.size)[tp.index] if cut else data()
    model.layer(x).square().sum().backward()
    buffers.finish()
    return {name: gradient.clone() for name, gradient in buffers.gradients().items()}


@pytest.mark.parametrize(("cut", "fused"), [(False, False), (True, False), (True, True)])
def test_an_adapter_of_a_replicated_layer_has_the_gradients_of_one_rank(
    worker_pool: WorkerPool, single: Mesh, cut: bool, fused: bool
) -> None:
    truth = step_alone(single, False, False)
    assert truth.keys() == {"layer.lora_a", "layer.lora_b"}
    for found in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), step_alone, cut, fused):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("product", [PLAIN, Scaled(), LORA])
def test_dgrad_and_wgrad_equal_autograd(single: Mesh, product: Product) -> None:
    """`AccumulatingProduct` uses them; without accumulators, it returns all gradients."""
    layer = Pair(single, product, False, 1).up
    gradients = []
    for layer.product in (product, AccumulatingProduct(product, {})):
        x = data().requires_grad_()
        inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
        gradients.append(torch.autograd.grad(layer(x).square().sum(), inputs))
    for own, automatic in zip(*gradients, strict=True):
        torch.testing.assert_close(own, automatic, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("product", [Scaled(), LORA])
def test_merged_weights_compute_the_same(single: Mesh, product: Product) -> None:
    model, plain = Pair(single, product, False, 1), Pair(single, PLAIN, False, 1)
    plain.load_state_dict(merged_parameters(model))
    torch.testing.assert_close(plain(data()), model(data()), rtol=1e-12, atol=1e-12)


def test_an_adapter_computes_the_formula_of_the_paper(single: Mesh) -> None:
    layer = Pair(single, LORA, False, 1).down
    x = torch.randn(ROWS, 1, F, dtype=torch.float64)
    w, a, b = (getattr(layer, name) for name in layer.product_parameters)
    expected = x @ w.T + (5.0 / 3) * (x @ a.T @ b.T) + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    assert trained == {"lora_a", "lora_b"}


def test_a_model_with_new_adapters_computes_the_same(single: Mesh) -> None:
    layer = RowParallelLinear(F, H, single, product=LORA)
    initialize_parameters(layer, seed=1, mesh=single)
    assert not layer.lora_b.any()
    assert 0.9 * F**-0.5 < layer.lora_a.abs().max() <= F**-0.5


def test_models_without_adapters_are_not_frozen(single: Mesh) -> None:
    model = Pair(single, Scaled(), False, 1)
    assert not freeze_all_but_adapters([model], [model.up.product])
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "weight",
    [
        Sharding((4, 6, 10), "tp", 0, spill_dim=1),
        Sharding((6, 10), "tp", 1),
        Sharding((4, 2, 6, 10), "expert_tp", 2, fused_dim=1, experts=True),
        Sharding((4, 6, 10), "expert_tp", 2, experts=True),
        Sharding((100, 10), "tp", 0, 128, vocabulary=True),
    ],
)
def test_one_matrix_is_cut_like_the_weight_and_the_other_has_a_partial_gradient(
    weight: Sharding,
) -> None:
    a, b = LORA.shardings(weight).values()
    cut, whole = (a, b) if weight.dim == len(weight.shape) - 1 else (b, a)
    assert (whole.axis, whole.partial, cut.partial) == (None, weight.axis, None)
    last = weight.dim == len(weight.shape) - 1
    assert cut.dim == (len(cut.shape) - 1 if last else weight.dim)
    assert (cut.axis, cut.padded, cut.spill_dim) == (weight.axis, weight.padded, weight.spill_dim)
    assert a.shape == (*weight.shape[: weight.experts], 3, 10)
    assert b.shape == (*weight.shape[:-1], 3) and b.fused_dim == weight.fused_dim
    assert a.experts == b.experts == weight.experts and not (a.vocabulary or b.vocabulary)


@pytest.mark.parametrize(
    "settings", [{"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"target_modules": ()}]
)
def test_invalid_adapters_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=f"^{next(iter(settings))} "):
        LoRAConfig(**settings)


def test_kinds_and_settings_of_products_cannot_be_changed() -> None:
    """Several runs of a process share them."""
    for shared, name in ((find_product("lora"), "name"), (LoRAConfig(), "rank")):
        with pytest.raises(FrozenInstanceError):
            setattr(shared, name, "other")


def test_products_are_found_by_name() -> None:
    products = find_product("lora").build(LoRAConfig(4, 8.0, ("linear_fc2",)))
    assert products == {"linear_fc2": LoRA(4, 8.0)}
    assert set(find_product("lora").build()) == set(LoRAConfig().target_modules)
    with pytest.raises(
        LayoutError, match="no product of linear layers 'lara'; did you mean 'lora'"
    ):
        find_product("lara")


def test_the_layer_registers_the_parameters_of_its_product(single: Mesh) -> None:
    layer = Pair(single, Scaled(), False, 1).down
    assert (
        set(layer.sharding)
        == set(dict(layer.named_parameters()))
        == {
            "weight",
            "bias",
            "factor",
        }
    )
    assert layer.sharding["factor"].partial == "tp"


def test_a_parameter_name_of_the_layer_is_refused(single: Mesh) -> None:
    class Clash(Scaled):
        def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
            return {"bias": Sharding((H,))}

    with pytest.raises(LayoutError, match="both have a parameter 'bias'"):
        RowParallelLinear(F, H, single, product=Clash(), bias=False)
