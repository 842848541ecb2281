import json
import shutil
import subprocess
import sys

import pytest

SAMPLE = ("gpt2-exact-gelu", "llama")
"""Without recomputation, and with it and dropout; all models go through every plan."""

COMPILE = """
import json, sys
import torch
from megatron_models import GPT, Dropout, GPTConfig, Placement
from megatron_parallel import DropoutKey, Mesh, RecomputeConfig

key = DropoutKey.for_batch(seed=1, iteration=1, samples=torch.arange(2), positions=8)
dropout = Dropout(key, hidden=0.1, attention=0.1)
plans = (
    RecomputeConfig(),
    RecomputeConfig(granularity="selective", modules=("core_attn", "mlp")),
    RecomputeConfig(granularity="full", method="uniform", num_layers=1),
    RecomputeConfig(
        granularity="full", method="block", num_layers=1, distribute_saved_activations=False
    ),
)
for number, text in enumerate(json.load(sys.stdin)):
    plan = plans[number % len(plans)]
    model = GPT(GPTConfig.from_json(text), Placement(Mesh.single(), recompute=plan))
    tokens = torch.randint(model.config.vocab_size, (2, 8))
    labels = torch.randint(model.config.vocab_size, (2, 8))
    drop = dropout if number % 2 else None
    model.loss(tokens, labels, dropout=drop).mean().backward()
    eager = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.compiler.reset()
    # Generates code for one model at most; a trace of forward and backward takes less time.
    backend = sys.argv[1] if number == 1 else "aot_eager"
    compiled = torch.compile(model.loss, fullgraph=True, backend=backend)
    compiled(tokens, labels, dropout=drop).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-4, atol=1e-6, msg=name)
"""


@pytest.mark.parametrize(
    "how", ["sample", *(pytest.param(how, marks=pytest.mark.slow) for how in ("all", "generated"))]
)
def test_loss_compiles_as_one_graph_and_gives_the_same_gradients(small, model_changes, how):
    """Runs in a process of its own, without the checks of shapes."""
    names = model_changes if how == "all" else SAMPLE
    models = [small(**model_changes[name]).to_json() for name in names]
    if how == "generated" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, "inductor" if how == "generated" else "aot_eager"],
        input=json.dumps(models),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


EXPERTS = """
import sys
import torch
from megatron_models import GPT, GPTConfig, Placement
from megatron_parallel import AuxiliaryLosses, Mesh
from torch._dynamo.utils import counters

config = GPTConfig(
    num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=50, num_experts=4,
    max_position_embeddings=16, make_vocab_size_divisible_by=1, moe_aux_loss_coeff=0.01,
)
model = GPT(config, Placement(Mesh.single(), dtype=getattr(torch, sys.argv[1])))
compiled = torch.compile(model, dynamic=False, backend=sys.argv[2])
graphs = []
for _ in range(4):
    tokens = torch.randint(50, (2, 16))
    found = []
    for forward in (model, compiled):
        losses = AuxiliaryLosses({name: 32.0 for name in config.auxiliary_losses})
        loss = forward(tokens, labels=tokens, auxiliary_losses=losses).mean()
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters()), *losses.sums.values()])
        model.zero_grad()
    for eager, other in zip(*found, strict=True):
        eager, other = torch.as_tensor(eager), torch.as_tensor(other)
        if eager.dtype is torch.float64:  # a sum of losses in float32
            eager, other = eager.float(), other.float()
        # Eager code sums the rows of a token by another kernel, whose float32 has other last bits.
        narrow = {"rtol": 0.016, "atol": 0.016 * float(eager.abs().max())}
        torch.testing.assert_close(other, eager, **narrow if eager.dtype.itemsize == 2 else {})
    graphs.append(counters["stats"]["unique_graphs"])
assert graphs[0] > 0
# Tokens of an expert change from batch to batch, but nothing is compiled again.
assert len({*graphs}) == 1, graphs
"""


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("float32", "aot_eager"),
        pytest.param("bfloat16", "aot_eager", marks=pytest.mark.slow),
        pytest.param("float32", "inductor", marks=pytest.mark.slow),
    ],
)
def test_experts_compile_once_and_give_the_same_gradients(dtype, backend):
    """Compares experts in a loop (float32), and in one kernel (bfloat16)."""
    done = subprocess.run(
        [sys.executable, "-c", EXPERTS, dtype, backend],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
