"""Lookups of embeddings: their gradient is added to the main gradient, without a dense matrix."""

import copy
from typing import Any

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    VocabParallelEmbedding,
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.tensor_parallel import PLAIN, AccumulatingLookup, Lookup
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

VOCAB, H = 64, 5


class Rows:
    """A lookup by indexing; counts the gradients that it adds."""

    def __init__(self) -> None:
        self.firsts: list[bool] = []

    def forward(self, tokens: Tensor, weight: Tensor, start: int) -> Tensor:
        absent = (tokens < start) | (tokens >= start + len(weight))
        rows = weight[(tokens - start).masked_fill(absent, 0)]
        return rows.masked_fill(absent[..., None], 0.0)

    def add_gradient(
        self, into: Tensor, dy: Tensor, tokens: Tensor, start: int, *, first: bool
    ) -> None:
        self.firsts.append(first)
        if first:
            into.zero_()  # it may be uninitialised memory, with NaN
        for row, token in zip(dy.flatten(0, -2), tokens.flatten().tolist(), strict=True):
            if start <= token < start + len(into):
                into[token - start] += row


def gradient(mesh: Mesh, lookup: Lookup | None, tied: bool, **settings: Any) -> tuple[Any, ...]:
    """Returns the gradient of three micro-batches, and what the lookup added."""
    layer = VocabParallelEmbedding(VOCAB, H, mesh, lookup=lookup, dtype=torch.float64)
    layer.product = PLAIN if tied else None
    initialize_parameters(layer, seed=1, mesh=mesh)
    buffers = GradientBuffers(
        layer.named_parameters(), collect_shardings(layer), mesh, DataParallelConfig(**settings)
    )
    fusion = fuse_gradient_accumulation([layer], [buffers])
    for number in range(3):
        buffers.begin(last=number == 2)
        tokens = torch.randint(VOCAB, (7, 2), generator=torch.Generator().manual_seed(number))
        y = layer(tokens)
        (layer.output(y) if tied else y).square().sum().backward()
    buffers.finish()
    return buffers.shard_gradients()["weight"].clone(), getattr(lookup, "firsts", []), fusion.fused


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize(
    "settings", [{}, {"use_distributed_optimizer": True}], ids=["whole", "sharded"]
)
def test_the_gradient_equals_that_of_autograd(
    worker_pool: WorkerPool, tied: bool, settings: dict[str, Any]
) -> None:
    def both(mesh: Mesh) -> tuple[float, list[bool], tuple[str, ...]]:
        expected, _, _ = gradient(mesh, None, tied, **settings)
        found, firsts, fused = gradient(mesh, Rows(), tied, **settings)
        return float((found - expected).abs().max()), firsts, fused

    for difference, firsts, fused in worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), both):
        assert difference < 1e-12 and fused == ("weight",)
        # The output layer comes first in the backward pass, and overwrites the last step's sum.
        assert firsts == [not tied, False, False]


def test_autograd_grad_returns_the_gradient_of_a_fused_weight(single: Mesh) -> None:
    rows = Rows()
    layer = VocabParallelEmbedding(VOCAB, H, single, lookup=rows, dtype=torch.float64)
    initialize_parameters(layer, seed=1, mesh=single)
    buffers = GradientBuffers(layer.named_parameters(), collect_shardings(layer), single)
    tokens = torch.tensor([[3, 5, 3]])
    (expected,) = torch.autograd.grad(layer(tokens).square().sum(), layer.weight)
    fuse_gradient_accumulation([layer], [buffers])
    assert isinstance(layer.lookup, AccumulatingLookup)
    (found,) = torch.autograd.grad(layer(tokens).square().sum(), layer.weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert rows.firsts == [True]


def test_a_row_that_many_tokens_select_has_an_exact_gradient_in_bf16(single: Mesh) -> None:
    """512 times 1: bf16 has 8 bits, so sums in it stay at 256."""
    layer = VocabParallelEmbedding(VOCAB, H, single, dtype=torch.bfloat16)
    initialize_parameters(layer, seed=1, mesh=single)
    tokens = torch.full((2, 260), 3)
    tokens[1, :8] = torch.arange(8) + 10
    found = layer(tokens)
    assert torch.equal(found, layer.weight[tokens])
    found.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad[3].eq(512).all() and layer.weight.grad[10:18].eq(1).all()
    assert layer.weight.grad.sum(1).count_nonzero() == 9


def test_a_copy_of_a_layer_leaves_gradients_to_autograd(single: Mesh) -> None:
    layer = VocabParallelEmbedding(VOCAB, H, single, lookup=Rows(), dtype=torch.float64)
    buffers = GradientBuffers(layer.named_parameters(), collect_shardings(layer), single)
    fuse_gradient_accumulation([layer], [buffers])
    assert isinstance(copy.deepcopy(layer).lookup, Rows)


def test_lookups_of_trained_weights_inside_a_model_are_fused(single: Mesh) -> None:
    model = nn.ModuleList(
        [VocabParallelEmbedding(VOCAB, H, single, lookup=Rows()) for _ in range(3)]
    )
    model[0].weight.requires_grad_(False)
    buffers = GradientBuffers(model.named_parameters(), collect_shardings(model), single)
    assert fuse_gradient_accumulation([model], [buffers]).fused == ("1.weight", "2.weight")
    assert isinstance(model[0].lookup, Rows)
