"""Products with state in each layer, or with gradients of weights of their own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    Sharding,
    StepState,
    TrainableChunks,
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.sharding import ZEROS, collect_states
from megatron_parallel.tensor_parallel import (
    ColumnParallelLinear,
    LayerProduct,
    PlainProduct,
    Product,
    ReplicatedLinear,
    RowParallelLinear,
    WeightGradientRequest,
    Weights,
    differentiate,
    multiply_matrix,
)
from torch import Tensor, nn


class Doubled(PlainProduct):
    """`2 x W^T`, whose gradients are tripled so that they are seen to be its own."""

    uses_requests = False

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        return self

    def forward(
        self, x: Any, weights: Any, bias: Any = None, multiply: Any = multiply_matrix
    ) -> Tensor:
        return differentiate(self, self._forward, x, weights, bias, multiply)

    def _forward(self, x: Tensor, weights: Weights, bias: Tensor | None, _: Any) -> Tensor:
        y = 2 * x @ weights[0].t()
        return y if bias is None else y + bias

    def dgrad(self, dy: Tensor, weights: Weights) -> Tensor:
        return 3 * dy @ weights[0]

    def wgrad(
        self,
        dy: Tensor,
        x: Tensor,
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        return (3 * dy.t() @ x,)


class Counted(Doubled):
    """Counts the rows that it has multiplied, in each layer."""

    uses_requests = True

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        table: dict[str, Sharding] = layer.sharding  # type: ignore[assignment]
        table["rows"] = Sharding((), init=ZEROS, reduce="sum")
        bound = Counted()
        bound.state = StepState(layer, "rows", mesh, torch.add, parameter="weight")  # type: ignore[attr-defined]
        return bound

    def wgrad(self, dy: Tensor, x: Tensor, weights: Weights, requests: Any) -> Any:
        self.state.add(torch.tensor(len(x)))  # type: ignore[attr-defined]
        return (requests[0](dy, x),)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
def test_a_layer_binds_its_product(single: Mesh, kind: Any) -> None:
    product = Counted()
    assert isinstance(product, LayerProduct)
    assert not isinstance(PlainProduct(), LayerProduct)
    model = nn.ModuleList([kind(4, 6, single, product=product) for _ in range(2)])
    initialize_parameters(model, seed=1, mesh=single)
    assert list(collect_states([model])) == ["0.weight.rows", "1.weight.rows"]
    stages = TrainableChunks([model], single)
    for rows in (3, 5):
        model[0](torch.randn(rows, 4)).sum().backward()
    stages.update_states()
    assert [float(layer.rows) for layer in model] == [8, 0]


def test_gradients_are_those_of_the_product(single: Mesh) -> None:
    layer = ColumnParallelLinear(4, 6, single, product=Doubled(), dtype=torch.float64)
    initialize_parameters(layer, seed=1, mesh=single)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    y, dy = layer(x), torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(y, 2 * x @ layer.weight.t() + layer.bias)
    inputs = (x, layer.weight, layer.bias)
    dx, dweight, dbias = torch.autograd.grad(y, inputs, dy)
    torch.testing.assert_close(dx, 3 * dy @ layer.weight)
    torch.testing.assert_close(dweight, 3 * dy.view(6, 6).t() @ x.view(6, 4))
    torch.testing.assert_close(dbias, dy.sum((0, 1)))


def test_gradients_of_the_product_s_own_are_not_fused(single: Mesh) -> None:
    model = nn.ModuleList(
        [ColumnParallelLinear(4, 6, single, product=each) for each in (Doubled(), Counted())]
    )
    initialize_parameters(model, seed=1, mesh=single)
    config = DataParallelConfig(gradient_accumulation_fusion=False)
    buffers = GradientBuffers(model.named_parameters(), collect_shardings(model), single, config)
    found = fuse_gradient_accumulation([model], [buffers])
    assert found.fused == ("1.weight",)
    assert found.not_fused == {"0.weight": "their product computes the gradient itself"}
    x = torch.randn(5, 4)
    buffers.begin(last=True)
    sum(layer(x).sum() for layer in model).backward()
    buffers.finish()
    expected = torch.ones(5, 6).t() @ x
    torch.testing.assert_close(buffers.gradients()["0.weight"], 3 * expected)
    torch.testing.assert_close(buffers.gradients()["1.weight"], expected)
