"""Layers and losses compile without graph breaks, in new processes without type checks.

Dynamo cannot trace functions that the import hook of jaxtyping has wrapped. These tests are slow,
since importing the compiler takes longer than most tests. Among the fast tests, those of
megatron-models compile the same layers and loss in a GPT.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import operator
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    Mesh,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from torch import nn

mesh = Mesh.single()
model = nn.ModuleDict({
    "embedding": VocabParallelEmbedding(30, 8, mesh, padded=32),
    "column": ColumnParallelLinear(8, 12, mesh),
    "row": RowParallelLinear(12, 8, mesh),
})
initialize_parameters(model, seed=0, mesh=mesh)
tokens = torch.randint(0, 30, (5, 2))
operators = []

def network(tokens):
    return model["row"](model["column"](model["embedding"](tokens)))

def loss(logits):
    return vocab_parallel_cross_entropy(logits, tokens, mesh.axis("tp"), 30).sum()

def recorder(graph, example):
    operators.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
    return graph.forward

compiled = torch.compile(network, fullgraph=True, backend=recorder)
assert torch.allclose(compiled(tokens), network(tokens), rtol=0, atol=1e-6)
assert operators == [
    torch.nn.functional.embedding, *(torch._C._nn.linear, operator.add) * 2
], operators

gradients = []
for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
    logits = torch.linspace(-3, 3, 320).reshape(5, 2, 32).requires_grad_()
    function(logits).backward()
    gradients.append(logits.grad)
assert torch.allclose(*gradients, rtol=0, atol=1e-6)

# 16-bit logits take another backward pass: compare with torch in float64.
tokens[0, 1] = -100
for smoothing in (0.0, 0.1):
    def smoothed(logits):
        return vocab_parallel_cross_entropy(
            logits, tokens, mesh.axis("tp"), 30, label_smoothing=smoothing
        ).sum()

    logits = torch.linspace(-3, 3, 320).reshape(5, 2, 32).bfloat16().requires_grad_()
    found = torch.compile(smoothed, fullgraph=True, backend="aot_eager")(logits)
    found.backward()
    exact = logits.detach().double().requires_grad_()
    true = torch.nn.functional.cross_entropy(
        exact[..., :30].flatten(0, 1), tokens.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    true.backward()
    assert torch.allclose(found.double(), true, rtol=1e-5), (found, true)
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=0.01, atol=1e-6)
"""


SEVERAL = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_parallel import (
    ColumnParallelLinear,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
    vocab_parallel_cross_entropy,
)
from megatron_parallel.tensor_parallel import column_parallel_linear
from torch import nn

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = Mesh.bind(ParallelLayout(tp=2), timeout=timedelta(seconds=60))
tokens = torch.arange(12).reshape(6, 2)
for sequence_parallel in (False, True):
    options = {"sequence_parallel": sequence_parallel}
    model = nn.ModuleDict({
        "embedding": VocabParallelEmbedding(30, 8, mesh, padded=32, **options),
        "column": ColumnParallelLinear(8, 12, mesh, **options),
        "row": RowParallelLinear(12, 8, mesh, **options),
    })
    initialize_parameters(model, seed=0, mesh=mesh)

    def network(tokens):
        x = model["row"](model["column"](model["embedding"](tokens)))
        weight = model["embedding"].weight
        logits = column_parallel_linear(x, weight, None, mesh.axis("tp"), sequence_parallel)
        return vocab_parallel_cross_entropy(logits, tokens, mesh.axis("tp"), 30).sum()

    results = []
    for function in (network, torch.compile(network, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = function(tokens)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for eager, compiled in zip(*results, strict=True):
        assert torch.allclose(eager, compiled, rtol=0, atol=1e-6)
"""


GENERATED = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_parallel import Mesh, ParallelLayout, vocab_parallel_cross_entropy

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = Mesh.bind(ParallelLayout(tp=2), timeout=timedelta(seconds=120))
torch.manual_seed(0)
whole = torch.randn(6, 2, 32, dtype=torch.float64)
tokens = torch.arange(12).reshape(6, 2)
for smoothing in (0.0, 0.1):
    def loss(logits):
        return vocab_parallel_cross_entropy(
            logits, tokens, mesh.axis("tp"), 30, label_smoothing=smoothing
        )

    exact = whole.clone().requires_grad_()
    true = torch.nn.functional.cross_entropy(
        exact[..., :30].flatten(0, 1), tokens.flatten(), label_smoothing=smoothing, reduction="none"
    ).view(6, 2)
    true.sin().sum().backward()
    own = slice(16 * rank, 16 * rank + 16)
    logits = whole[..., own].clone().requires_grad_()
    found = torch.compile(loss, fullgraph=True)(logits)
    found.sin().sum().backward()
    assert torch.allclose(found, true, rtol=1e-12, atol=1e-12), (found - true).abs().max()
    assert torch.allclose(logits.grad, exact.grad[..., own], rtol=1e-12, atol=1e-12)
"""


RING = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.context_parallel import (
    ContextSplit,
    SequenceMask,
    all_to_all_attention,
    plan_ring,
    ring_attention,
)
from torch.nn.functional import scaled_dot_product_attention

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
mesh = Mesh.bind(ParallelLayout(cp=3), timeout=timedelta(seconds=60))
axis = mesh.axis("cp")
whole = torch.randn(4, 24, 2, 6, 8, generator=torch.Generator().manual_seed(0))
split = ContextSplit.zigzag(24, 3)
own = split.indices[rank, 0]

def heads(q, k, v):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)

def ring(q, k, v):
    plan = plan_ring(SequenceMask(causal=True), ContextSplit.zigzag(24, 3), rank)
    return ring_attention(q, k, v, plan, axis)

def scattered(q, k, v):
    return all_to_all_attention(q, k, v, ContextSplit.zigzag(24, 3), axis, heads)

inputs = [x.clone().requires_grad_() for x in whole[:3]]
wanted = heads(*inputs)
wanted.backward(whole[3])
wanted = [wanted.detach(), *(x.grad for x in inputs)]
for function in (ring, scattered):
    parts = [x[own].clone().requires_grad_() for x in whole[:3]]
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*parts)
    found.backward(whole[3][own])
    for ours, expected in zip([found.detach(), *(x.grad for x in parts)], wanted, strict=True):
        torch.testing.assert_close(ours, expected[own], rtol=0, atol=1e-5)
"""


EXPERTS = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.expert_parallel import RowOps, build_dispatcher

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = Mesh.bind(ParallelLayout(ep=2), timeout=timedelta(seconds=60))
torch.manual_seed(rank)
tokens, weights = torch.randn(6, 4), torch.rand(6, 2)
experts = torch.stack([torch.randperm(4)[:2] for _ in tokens])
matrices = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(9))[2 * rank : 2 * rank + 2]

def sort(experts, count):
    flat = experts.flatten()
    return flat.argsort(stable=True), torch.zeros(count, dtype=torch.int64).scatter_add(
        0, flat, torch.ones_like(flat)
    )

def permute(tokens, order, choices):
    return tokens[order // choices]

def unpermute(rows, order, weights):
    weighted = (rows * weights.flatten()[order][:, None]).where((order >= 0)[:, None], 0)
    empty = rows.new_zeros(len(weights), rows.shape[1])
    return empty.index_add(0, order.clamp(min=0) // 2, weighted)

def layer(tokens, weights, dispatcher):
    dispatch = dispatcher.route(experts).dispatch(tokens, weights)
    rows, counts, _ = dispatch.wait()
    owner = torch.searchsorted(counts.cumsum(0), torch.arange(len(rows)), right=True).clamp(max=1)
    outputs = torch.einsum("mh,mhk->mk", rows, matrices[owner])
    return dispatch.combine(outputs).wait()

for factor in (None, 2.0):
    ops = RowOps(sort, permute, unpermute)
    dispatcher = build_dispatcher("alltoall", mesh, 4, ops, rank_capacity_factor=factor)
    compiled = torch.compile(layer, fullgraph=factor is not None, backend="aot_eager")
    results = []
    for function in (layer, compiled):
        x = tokens.clone().requires_grad_()
        y = function(x, weights, dispatcher)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), x.grad))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-6)
"""


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("code", "world_size"),
    [(SEVERAL, 2), (GENERATED, 2), (RING, 3), (EXPERTS, 2)],
    ids=["tensor parallel", "generated code", "context parallel", "expert parallel"],
)
def test_several_ranks_compile_without_graph_breaks(
    tmp_path: Path, code: str, world_size: int
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, errors


def test_layers_are_one_operator_each_and_the_loss_has_no_graph_breaks() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
