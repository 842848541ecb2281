"""Distances of gradients in bfloat16 from those in float32 of the same rounded weights.

    PYTHONPATH=tooling python tooling/bf16_gradients.py

One micro-batch of a GPT, a BERT and a T5 on a CPU, of 256, 4,096 and 16,384 tokens in sequences of
128, by one and two threads, and by two data-parallel ranks of half the sequences each. A distance
is the norm of the difference over the norm of the gradient in float32. A sum over tokens in 16 bits
makes it grow with the number of tokens. Rounding the result alone gives up to `PRECISION`, so
smaller distances count as that in the growth. Each distance is the root mean square of those of
`DRAWS` draws of the samples. All sentences of BERT are in order, since gradients
of its sequence head nearly cancel otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from megatron_models import BertConfig, EncoderDecoderConfig, GPTConfig, Placement, find_kind
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import Rank, WorkerPool
from megatron_train.engine import StepEngine
from megatron_train.prove.record import make_asymmetric
from megatron_train.prove.samples import documents, segments, source_and_target, stacked
from megatron_train.tasks.bert import BertTask
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.t5 import T5Task
from megatron_train.tasks.task import MicroBatch
from torch import Tensor

SEQUENCE: Final = 128
TOKENS: Final = (256, 4096, 16_384)
LIMIT: Final = 0.02
"""Largest distance of a gradient."""
GROWTH: Final = 1.2
"""Largest distance with the most tokens, over that with the least."""
PRECISION: Final = 2.0**-8
"""Half the distance of neighbouring numbers in bfloat16, over the number."""
DRAWS: Final = 2
LONGEST: Final = 900.0
"""Seconds after which ranks count as hung. A busy machine needs minutes for 16,384 tokens."""
NOISE: Final = 1e-4
"""Gradients with a norm below this part of the whole one's are zero in exact arithmetic."""

_SIZES: Final[dict[str, Any]] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 150,
    "max_position_embeddings": SEQUENCE,
}
MODELS: Final = {
    "gpt": GPTConfig(**_SIZES),
    "bert": BertConfig(**_SIZES),
    "t5": EncoderDecoderConfig(
        **_SIZES,
        position_embedding_type="relative",
        encoder_num_layers=2,
        normalization="LayerNorm",
    ),
}
TASKS: Final[Mapping[str, Any]] = {"gpt": GPTTask, "bert": BertTask, "t5": T5Task}

Gradients = dict[str, Tensor]


def sample(kind: str, index: int) -> dict[str, Tensor]:
    """Returns the fields of a sample, half of whose tokens are equal."""
    row = documents(index, SEQUENCE)
    row["loss_mask"] = torch.ones(SEQUENCE)
    if kind == "bert":
        return {**segments(row), "is_random": torch.tensor(0)}
    return (
        row if kind == "gpt" else source_and_target(row, documents(index + 501, SEQUENCE), SEQUENCE)
    )


def engine_of(kind: str, mesh: Mesh, dtype: torch.dtype) -> StepEngine:
    """Returns an engine of one model."""
    config = MODELS[kind]
    stages = find_kind(config.kind).build(config, Placement(mesh, dtype=dtype), split=None)
    engine = StepEngine(TASKS[kind](stages, None, seed=7), mesh)
    make_asymmetric(engine)
    return engine


def gradients(kind: str, mesh: Mesh, dtype: torch.dtype, tokens: int, draw: int) -> Gradients:
    """Returns the gradients of one step whose micro-batch has some tokens on all ranks together."""
    engine = engine_of(kind, mesh, dtype)
    if dtype != torch.bfloat16:
        rounded = engine_of(kind, mesh, torch.bfloat16)
        for own, other in zip(_weights(engine), _weights(rounded), strict=True):
            own.data.copy_(other.data)
    axis = mesh.axis("dp")
    count = tokens // SEQUENCE // axis.size
    own = range(axis.index * count + 10_000 * draw, (axis.index + 1) * count + 10_000 * draw)
    fields = stacked([sample(kind, index) for index in own])
    batches = [MicroBatch.from_fields(fields, token_field="tokens")]
    engine.run(batches, engine.denominators(batches), 1)
    return {name: each.clone() for name, each in engine.stages.gradients().items()}


def _weights(engine: StepEngine) -> list[Tensor]:
    return [each for stage in engine.task.stages for each in stage.parameters()]


def distances(found: Gradients, exact: Gradients) -> dict[str, float]:
    """Returns the distance of each gradient that is not zero in exact arithmetic."""
    whole = sum(float(each.double().square().sum()) for each in exact.values()) ** 0.5
    return {
        name: float((found[name].double() - each.double()).norm() / each.double().norm())
        for name, each in exact.items()
        if float(each.double().norm()) > NOISE * whole
    }


def measure(kind: str, tokens: Sequence[int], threads: int, ranks: int) -> list[dict[str, float]]:
    """Returns the distances with each number of tokens.

    Args:
        kind: Kind of the model.
        tokens: Tokens of a micro-batch of all ranks together.
        threads: Threads of a rank.
        ranks: Data-parallel ranks.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        calls = [(count, draw) for count in tokens for draw in range(DRAWS)]
        exact = [gradients(kind, Mesh.single(), torch.float32, *call) for call in calls]
        if ranks == 1:
            half = [gradients(kind, Mesh.single(), torch.bfloat16, *call) for call in calls]
        else:
            with WorkerPool(ranks, timeout=LONGEST, collective_timeout=LONGEST) as pool:
                half = pool.run(_on_ranks, kind, calls, ranks=ranks)[0]
    finally:
        torch.set_num_threads(before)
    every = [distances(*pair) for pair in zip(half, exact, strict=True)]
    return [
        _root_mean_square(every[start : start + DRAWS]) for start in range(0, len(every), DRAWS)
    ]


def _root_mean_square(draws: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: (sum(draw[name] ** 2 for draw in draws) / len(draws)) ** 0.5 for name in draws[0]}


def _on_ranks(rank: Rank, kind: str, calls: Sequence[tuple[int, int]]) -> list[Gradients]:
    mesh = rank.mesh(ParallelLayout())
    return [gradients(kind, mesh, torch.bfloat16, *call) for call in calls]


def growth(found: Sequence[Mapping[str, float]]) -> float:
    """Returns the largest distance with the most tokens over that with the least, by parameter."""
    return max(
        max(found[-1][name], PRECISION) / max(found[0][name], PRECISION)
        for name in found[0].keys() & found[-1].keys()
    )


def main() -> None:
    """Prints the table."""
    print(
        "| model | threads | ranks | " + " | ".join(f"{n:,} tokens" for n in TOKENS) + " | growth |"
    )
    print("|---|---|---|" + "---|" * (len(TOKENS) + 1))
    for kind in MODELS:
        for threads, ranks in ((1, 1), (2, 1), (1, 2)):
            found = measure(kind, TOKENS, threads, ranks)
            worst = [max(each, key=each.__getitem__) for each in found]
            cells = (f"{each[name]:.4f} ({name})" for each, name in zip(found, worst, strict=True))
            print(f"| {kind} | {threads} | {ranks} | {' | '.join(cells)} | {growth(found):.2f} |")


if __name__ == "__main__":
    main()
