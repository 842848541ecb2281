"""A layer with experts on several ranks is a plain loop over experts, some without tokens."""

import zlib
from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPTConfig, Placement
from megatron_models.components.context import Context
from megatron_models.components.moe.module import MoE
from megatron_models.components.moe.spec import MoESpec
from megatron_parallel import Mesh, ParallelLayout, collect_shardings
from megatron_parallel.testing import WorkerPool
from torch import Tensor
from torch.nn import functional

EXPERTS, TOP, LENGTH, SAMPLES = 6, 2, 7, 3  # 21 tokens, which no number of ranks here divides
SPEC = GPTConfig(
    num_layers=1,
    hidden_size=12,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=50,
    max_position_embeddings=16,
    num_experts=EXPERTS,
    moe_router_topk=TOP,
    moe_router_add_bias=True,
    moe_ffn_hidden_size=8,
).component(MoESpec)
Parameters = dict[str, Tensor]


def value(name: str, shape: tuple[int, ...], idle: tuple[int, ...]) -> Tensor:
    """Returns a global parameter; the bias of the router keeps tokens from the idle experts."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
    if name == "router.bias":
        found[list(idle)] = -1e3
    return found


def inputs(rank: int) -> Tensor:
    """Returns the tokens of a data-parallel rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(LENGTH, SAMPLES, 12, generator=generator, dtype=torch.float64)


def weights_of(y: Tensor) -> Tensor:
    """Returns the weights of outputs in the objective."""
    return torch.arange(y.numel(), dtype=torch.float64).view(y.shape).sin()


def layer_on_ranks(mesh: Mesh, idle: tuple[int, ...], dispatcher: str) -> Any:
    """Returns output and gradient of the tokens, boxes of expert gradients, and rows of experts."""
    layer = MoE(SPEC, 0, Placement(mesh, dtype=torch.float64, dispatcher=dispatcher))
    table = collect_shardings(layer)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            whole = value(name, table[name].shape, idle)
            for piece in table[name].shard_boxes(mesh):
                parameter[piece.local.slices] = whole[piece.box.slices]
    rows: list[Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, given: rows.append(given[1].clone()))
    x = inputs(mesh.axis("dp").index).requires_grad_()
    y = layer(x, Context(Mask()))
    (y * weights_of(y)).sum().backward()
    gradients = [
        (name, piece.box.slices, parameter.grad[piece.local.slices].clone())
        for name, parameter in layer.named_parameters()
        if name.startswith("experts.") and parameter.grad is not None
        for piece in table[name].shard_boxes(mesh)
    ]
    return y.detach(), x.grad, gradients, rows[0]


def loop(idle: tuple[int, ...], ranks: int) -> tuple[list[Tensor], list[Tensor], Parameters]:
    """Returns outputs and gradients of the tokens of each rank, and of the parameters of experts.

    Each expert computes its tokens one after another.
    """
    shapes = {name: entry.sharding.shape for name, entry in SPEC.parameters().items()}
    own = {name: value(name, shape, idle).requires_grad_() for name, shape in shapes.items()}
    given = [inputs(rank).requires_grad_() for rank in range(ranks)]
    outputs = []
    for x in given:
        tokens = x.flatten(0, 1)
        scores = tokens @ own["router.weight"].t() + own["router.bias"]
        best, chosen = scores.topk(TOP)
        shares = best.softmax(-1)
        y = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            for token, place in (chosen == expert).nonzero().tolist():
                hidden = own["experts.up.weight"][expert] @ tokens[token]
                hidden = functional.gelu(hidden + own["experts.up.bias"][expert])
                out = own["experts.down.weight"][expert] @ hidden
                out = (out + own["experts.down.bias"][expert]) * shares[token, place]
                y = y.index_add(0, torch.tensor([token]), out[None])
        outputs.append(y.view(x.shape))
    objective: Any = sum((y * weights_of(y)).sum() for y in outputs)
    objective.backward()
    gradients = {name: p.grad for name, p in own.items() if p.grad is not None}
    return [y.detach() for y in outputs], [x.grad for x in given if x.grad is not None], gradients


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("layout", "idle"),
    [
        pytest.param({"dp": 2, "ep": 2}, (1, 4), id="dp2-ep2-one-on-each-rank"),
        pytest.param({"dp": 2, "ep": 2}, (3, 4, 5), id="dp2-ep2-all-of-a-rank"),
        pytest.param({"tp": 2, "ep": 2, "etp": 1}, (0, 1, 2), id="tp2-ep2-all-of-a-rank"),
        pytest.param({"tp": 2}, (0, 2, 5), id="tp2"),
        pytest.param({"tp": 2, "dp": 2, "ep": 2}, (0, 1, 2, 5), id="tp2-dp2-ep2"),
    ],
)
def test_experts_without_tokens_change_nothing(
    worker_pool: WorkerPool, layout: dict[str, int], idle: tuple[int, ...], dispatcher: str
) -> None:
    degrees = ParallelLayout(**{"dp": 1, **layout})
    outputs, tokens, gradients = loop(idle, layout.get("dp", 1))
    found = worker_pool.run_mesh(degrees, layer_on_ranks, idle, dispatcher)
    counts = []
    for rank, (y, x, parts, rows) in enumerate(found):
        data = degrees.coordinates(rank).dp
        torch.testing.assert_close(y, outputs[data], rtol=0, atol=1e-12)
        torch.testing.assert_close(x, tokens[data], rtol=0, atol=1e-12)
        counts.append(rows)
        for name, box, gradient in parts:
            torch.testing.assert_close(gradient, gradients[name][box], rtol=0, atol=1e-11)
    empty = {e for e in range(EXPERTS) if not gradients["experts.up.weight"][e].any()}
    assert empty == set(idle)
    assert any((rows == 0).any() for rows in counts)
