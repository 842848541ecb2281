"""Imports of programs that compile nothing, each in its own process."""

import subprocess
import sys

EAGER = """
import sys
import torch
from megatron_models import GPT, Dropout, GPTConfig
from megatron_parallel import DropoutKey, Mesh

config = GPTConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=50,
    max_position_embeddings=8,
    position_embedding_type="rope",
    activation="swiglu",
)
model = GPT(config, Mesh.single())
tokens = torch.randint(50, (2, 8))
key = DropoutKey.for_batch(seed=1, iteration=1, samples=torch.arange(2), positions=8)
model(tokens)
model.loss(tokens, tokens, dropout=Dropout(key, 0.1, 0.1)).mean().backward()
print([name for name in sys.modules if name.startswith("torch._dynamo")])
"""

PLAN = """
import sys
from megatron_models import GPTConfig
from megatron_models.stages import plan_stage
from megatron_parallel import ParallelLayout

config = GPTConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=50,
    max_position_embeddings=8,
)
plan_stage(config, ParallelLayout(pp=2), 1)
print([name for name in sys.modules if name == "torch"])
"""


def printed(script):
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_eager_training_does_not_import_the_compiler():
    """The import would take 3 to 4 seconds at every start."""
    assert printed(EAGER) == "[]"


def test_stages_are_planned_without_torch():
    assert printed(PLAN) == "[]"
