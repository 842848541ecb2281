"""A small task with unequal loss masks in float64, and trainers for it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from megatron_ckpt import ModelRecord
from megatron_optim import LearningRateSchedule, Optimizer, OptimizerConfig, WeightDecaySchedule
from megatron_parallel import Mesh, Sharding
from megatron_train.engine import StepEngine
from megatron_train.tasks.task import MicroBatch
from megatron_train.trainer import Trainer
from torch import Tensor, nn

VOCABULARY, LENGTH = 11, 6


class BigramTask:
    """Predicts each token from the previous one."""

    losses = ("lm loss",)
    metrics = ()
    auxiliary_losses = ()
    model_record = ModelRecord("bigram", None, 0, {"vocabulary": VOCABULARY})

    def __init__(self) -> None:
        table = nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            table.weight.normal_(generator=generator)
        table.sharding = {"weight": Sharding((VOCABULARY, VOCABULARY))}
        self.stages = (table,)

    def migrated_config(self, record):
        return record.config

    def fsdp_units(self, stage):
        return []

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        return {"lm loss": float(sum(batch.fields["loss_mask"].sum() for batch in batches))}

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> dict[str, Tensor]:
        return {"input": batch.fields["tokens"]}

    def loss(self, output: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        losses = nn.functional.cross_entropy(
            output.flatten(0, 1), batch.fields["labels"].flatten(), reduction="none"
        )
        return {"lm loss": (losses * batch.fields["loss_mask"].flatten()).sum()}

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        return 10.0 * sum(batch.tokens for batch in batches)


def sample(index: int) -> dict[str, Tensor]:
    """Returns a sample with between one and all tokens unmasked."""
    generator = torch.Generator().manual_seed(index)
    text = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
    kept = 1 + index % LENGTH
    mask = (torch.arange(LENGTH) < kept).double()
    return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}


def steps(micro: int, accumulation: int) -> Callable[[int], Iterator[Sequence[MicroBatch]]]:
    """Returns a function that yields steps over samples 0, 1, … in micro-batches of ``micro``."""

    def read(consumed: int) -> Iterator[Sequence[MicroBatch]]:
        def micro_batches() -> Iterator[MicroBatch]:
            index = consumed
            while True:
                rows = [sample(i) for i in range(index, index + micro)]
                fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
                yield MicroBatch.from_fields(fields, token_field="tokens")
                index += micro

        batches = micro_batches()
        while True:
            yield list(islice(batches, accumulation))

    return read


@pytest.fixture
def make_trainer():
    """Returns a function that makes a trainer for the bigram task."""

    def make(micro: int = 2, accumulation: int = 3, **changes: Any) -> Trainer:
        mesh = Mesh.single()
        engine = StepEngine(BigramTask(), mesh)
        arguments: dict[str, Any] = {
            "engine": engine,
            "optimizer": Optimizer(engine.stages, OptimizerConfig(lr=0.1)),
            "learning_rate": LearningRateSchedule(max_lr=0.1, decay_samples=1000),
            "weight_decay": WeightDecaySchedule(start=0.01, end=0.01, samples=1000),
            "micro_batches": steps(micro, accumulation),
            "train_iters": 8,
        }
        return Trainer(**{**arguments, **changes})

    return make


@pytest.fixture
def make_steps():
    """Returns `steps`."""
    return steps


class Bar:
    """A progress bar that records what it counts."""

    def __init__(self, *, total: int, unit: str, disable: bool | None, leave: bool) -> None:
        # Shown on a terminal only, and removed at the end.
        assert (disable, leave) == (None, False)
        self.total, self.unit, self.n = total, unit, 0

    def update(self, more: int) -> None:
        self.n += more

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """Returns the list of the progress bars that a command shows."""
    shown: list[Bar] = []

    def show(**settings: Any) -> Bar:
        shown.append(Bar(**settings))
        return shown[-1]

    monkeypatch.setattr("tqdm.tqdm", show)
    return shown
