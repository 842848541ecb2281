"""Compiled without graph breaks on one rank; in a fresh process, where nothing is type-checked.

Dynamo cannot trace functions that jaxtyping's import hook has wrapped.
"""

import subprocess
import sys

CODE = """
import torch
from megatron_parallel import (
    ColumnParallelLinear, Mesh, RowParallelLinear, VocabParallelEmbedding, initialize_parameters,
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
assert torch.equal(compiled(tokens), network(tokens))
assert operators == [torch.nn.functional.embedding] + [torch._C._nn.linear] * 2, operators

gradients = []
for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
    logits = torch.linspace(-3, 3, 320).reshape(5, 2, 32).requires_grad_()
    function(logits).backward()
    gradients.append(logits.grad)
assert torch.allclose(*gradients, rtol=0, atol=1e-6)
"""


def test_layers_are_one_operator_each_and_the_loss_compiles_whole() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
