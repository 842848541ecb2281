"""Products that layers multiply by: gradients by autograd and by the product's own calls."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    DataParallelConfig,
    GradientBuffers,
    Init,
    LayoutError,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    Sharding,
    collect_shardings,
    fuse_gradient_accumulation,
    initialize_parameters,
)
from megatron_parallel.tensor_parallel import (
    PLAIN,
    Accumulating,
    Product,
    Wanted,
    Weights,
    overlap_forward,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

H, F, ROWS = 8, 12, 8


class Scaled:
    """`(x W^T) * g` with a factor `g` for each output: a product with a vector of its own."""

    adapts = False

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
        self, dy: Tensor, x: Tensor, weights: Weights, wanted: Sequence[Wanted | None]
    ) -> tuple[Tensor | None, ...]:
        own = None
        if wanted[1]:
            own = (dy * PLAIN.forward(x, weights[:1])).sum(0).view_as(weights[1])
        scaled = dy * weights[1].flatten()
        return *PLAIN.wgrad(scaled, x, weights[:1], wanted[:1]), own

    def merged(self, weights: Weights) -> Tensor:
        return weights[0] * weights[1].unsqueeze(-1)


class Pair(nn.Module):
    """A column-parallel layer and a row-parallel one."""

    def __init__(self, mesh: Mesh, product: Product, cut: bool, chunks: int) -> None:
        super().__init__()
        how: Any = {"product": product, "sequence_parallel": cut, "dtype": torch.float64}
        how["init"] = Init("normal", 0.5)
        self.up = ColumnParallelLinear(H, (2, F), mesh, dim=1, fused_dim=0, **how)
        self.down = RowParallelLinear(F, H, mesh, **how)
        overlap_forward(self, chunks)
        initialize_parameters(self, seed=1, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).unbind(-2)
        return self.down(gate.sigmoid() * up)


def data() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 1, H, generator=generator, dtype=torch.float64)


def step(mesh: Mesh, product: Product, cut: bool, chunks: int, fused: bool) -> dict[str, Any]:
    """Global boxes of gradients, those of the input, and what is fused."""
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
        found[name] = [(p.box, gradient[p.local.slices].clone()) for p in table[name].pieces(mesh)]
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("cut", "chunks"), [(False, 1), (True, 1), (True, 2)])
def test_ranks_give_a_product_the_gradients_of_one(
    worker_pool: WorkerPool, single: Mesh, cut: bool, chunks: int, fused: bool
) -> None:
    truth = step(single, Scaled(), False, 1, False)
    layout = ParallelLayout(tp=2, dp=1)
    for found in worker_pool.run_mesh(layout, step, Scaled(), cut, chunks, fused):
        assert found.pop("fused") == (("up.weight", "down.weight") if fused else ())
        for name in truth.keys() - {"x", "fused"}:
            for box, gradient in found[name]:
                whole = truth[name][0][1][box.slices]
                torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("product", [PLAIN, Scaled()])
def test_own_gradients_are_autograds(single: Mesh, product: Product) -> None:
    """`Accumulating` takes the product's own; nothing is added up elsewhere here."""
    layer = Pair(single, product, False, 1).up
    gradients = []
    for layer.product in (product, Accumulating(product, {})):
        x = data().requires_grad_()
        gradients.append(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))
    for own, automatic in zip(*gradients, strict=True):
        torch.testing.assert_close(own, automatic, rtol=1e-12, atol=1e-12)


def test_a_merged_weight_computes_the_same(single: Mesh) -> None:
    layer = Pair(single, Scaled(), False, 1).up
    merged = Scaled().merged([layer.weight, layer.factor])
    y = nn.functional.linear(data(), merged.flatten(0, 1), layer.bias.flatten())
    torch.testing.assert_close(y.unflatten(-1, (2, F)), layer(data()), rtol=1e-12, atol=1e-12)


def test_a_products_parameters_are_the_layers(single: Mesh) -> None:
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


def test_a_name_that_the_layer_has_is_refused(single: Mesh) -> None:
    class Clash(Scaled):
        def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
            return {"bias": Sharding((H,))}

    with pytest.raises(LayoutError, match="parameter 'bias' is one of the layer's"):
        RowParallelLinear(F, H, single, product=Clash(), bias=False)
