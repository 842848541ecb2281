"""A small model of any width, and its training on the bytes of a book."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from megatron_models import GPT, GPTConfig
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import Mesh, TrainableParameters, collect_shardings
from torch import Tensor

BASE = 128
"""Width of the model that the learning rate is chosen for."""
HEADS = 4
VOCABULARY = 256
BOOK = Path(__file__).parents[2] / "corpus" / "moby_dick.jsonl"


def model_config(width: int, *, mup: bool, base: int = BASE, length: int = 64) -> GPTConfig:
    """Returns a model of two layers. At the width ``base`` both parametrizations are the same."""
    usual = GPTConfig(
        num_layers=2,
        hidden_size=width,
        ffn_hidden_size=2 * width,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        position_embedding_type="rope",
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
    )
    if not mup:
        return usual
    return replace(
        usual, use_mup=True, mup_base_hidden_size=base, mup_base_head_dim=float(base // HEADS)
    )


@cache
def book() -> Tensor:
    """Returns the bytes of the book, `[n]`."""
    lines = BOOK.read_text(encoding="utf-8").splitlines()
    text = "\n\n".join(json.loads(line)["text"] for line in lines)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batches(seed: int, *, size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tokens and labels `[size, length]` from random positions of the book."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(book()) - length, (size, 1), generator=generator)
        rows = book()[starts + torch.arange(length + 1)]
        yield rows[:, :-1], rows[:, 1:]


SETTINGS = OptimizerConfig(weight_decay=0.0, adam_beta2=0.95, clip_grad=0.0)


@dataclass
class Training:
    """A training run that is stepped by its caller, with Adam without weight decay and clipping.

    Attributes:
        config: The model.
        seed: Seed of weights and batches.
        size: Sequences of a batch.
        length: Length of a sequence.
        model: The model, in float32.
        steps: Number of steps done.
    """

    config: GPTConfig
    seed: int = 0
    size: int = 8
    length: int = 64
    model: GPT = field(init=False)
    steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        mesh = Mesh.single()
        self.model = GPT(self.config, mesh, seed=1234 + self.seed)
        table = collect_shardings(self.model)
        trainable = TrainableParameters(self.model.named_parameters(), table, mesh)
        self._optimizer = Optimizer(trainable, SETTINGS, self.config.width_ratios())
        self._batches = batches(self.seed, size=self.size, length=self.length)

    def step(self, lr: float) -> float:
        """Trains on one batch; returns its loss in nats per byte."""
        tokens, labels = next(self._batches)
        loss = self.model(tokens, labels=labels).mean()
        loss.backward()
        self._optimizer.step(lr)
        self._optimizer.zero_grad()
        self.steps += 1
        return float(loss.detach())


def final_loss(training: Training, lr: float, steps: int) -> float:
    """Trains with a warm-up and a linear decay to 0; returns the mean loss of the last fifth."""
    warmup = max(1, steps // 10)
    losses = []
    for step in range(1, steps + 1):
        rate = lr * min(step / warmup, (steps - step + 1) / (steps - warmup + 1))
        losses.append(training.step(rate))
    last = losses[-max(1, steps // 5) :]
    return sum(last) / len(last)
