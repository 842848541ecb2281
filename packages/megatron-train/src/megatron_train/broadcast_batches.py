"""Micro-batches that one rank of each model replica reads and broadcasts to the others.

Ranks that differ only in tensor, context or pipeline parallelism compute on the same samples. With
--broadcast-batches only one of them, the first on the first pipeline rank, opens the corpus. It
broadcasts the micro-batches of a step over its pipeline rank, and each of those ranks down the
pipeline. So files are opened and indices are built once per data-parallel rank instead of once per
rank, and ranks cannot read different versions of a corpus that is being replaced. On the other
hand, all ranks wait for one. From a local disk it is faster that each rank reads for itself
(`tooling/bench/batches.py`), which is the default.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch
from megatron_models import tokens_per_pair
from megatron_parallel import Mesh
from megatron_parallel.collectives import broadcast_tensors
from torch import Tensor

from megatron_train.batches import RunBatches
from megatron_train.config.pool_checks import slice_multiple
from megatron_train.config.run import RunConfig
from megatron_train.document_pool import DocumentPool
from megatron_train.errors import TrainError
from megatron_train.tasks.kinds import TaskData
from megatron_train.tasks.task import MicroBatch

PURPOSE: Final = "micro-batches"
_WORDS: Final = "words"

Read = TypeVar("Read")


class Batches(Protocol):
    """Training, validation and test micro-batches of one rank of a run."""

    @property
    def has_test(self) -> bool:
        """Whether there are test samples."""

    @property
    def no_test_reason(self) -> str:
        """Reason why the test split of --split is empty; empty if it is not."""

    def training(self, consumed_samples: int) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each step after ``consumed_samples`` samples."""

    def validation(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each global batch of an evaluation, always the same ones."""

    def testing(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each global batch of the test; none without `has_test`."""


def open_batches(
    config: RunConfig,
    data: Callable[[], TaskData],
    mesh: Mesh,
    log: Callable[[str], None] | None = None,
) -> Batches:
    """Returns this rank's source of micro-batches: the corpus, or the rank that reads it.

    Args:
        config: The run.
        data: Returns the source of samples; called only on ranks that read.
        mesh: Mesh of the run.
        log: Called with one line that describes how a pool divides the documents of the first
            batch.
    """
    pool = None
    if config.layout.hybrid_cp:
        pool = DocumentPool(
            mesh,
            config.training.max_seqlen_per_dp_cp_rank or 0,
            multiple=slice_multiple(config),
            tokens_per_pair=tokens_per_pair(config.model),
            log=log,
        )

    def read() -> Batches:
        return RunBatches(config, data(), mesh.axis("dp"), pool)

    return BroadcastBatches(mesh, read) if config.data.broadcast_batches else read()


class BroadcastBatches:
    """`Batches` that one rank reads and broadcasts to the other ranks of its model replica.

    All ranks must request the same steps in the same order.

    Args:
        mesh: Mesh of the run.
        read: Opens the corpus; called only on reading ranks.

    Raises:
        TrainError: The reading rank could not open the corpus or read a step; has the message of
            that rank, which raises its own exception.
        CollectiveError: A rank did not take part within the mesh's time-out.
    """

    def __init__(self, mesh: Mesh, read: Callable[[], Batches]) -> None:
        self._mesh = mesh
        self._source: Batches | None = None
        if mesh.axis("tp_cp").index == mesh.axis("pp").index == 0:
            self._source = source = self._or_tell(read)
            self.has_test, self.no_test_reason = source.has_test, source.no_test_reason
            self._tell({"has_test": self.has_test, "no_test_reason": self.no_test_reason})
        else:
            words = self._heard(self._sent({}))
            self.has_test, self.no_test_reason = words["has_test"], words["no_test_reason"]

    def training(self, consumed_samples: int) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each step after ``consumed_samples`` samples."""
        return self._shared(lambda source: source.training(consumed_samples))

    def validation(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each global batch of an evaluation, always the same ones."""
        return self._shared(lambda source: source.validation())

    def testing(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each global batch of the test; none without `has_test`."""
        return self._shared(lambda source: source.testing())

    def _shared(
        self, start: Callable[[Batches], Iterator[Sequence[MicroBatch]]]
    ) -> Iterator[Sequence[MicroBatch]]:
        steps = None if self._source is None else start(self._source)
        while step := self._next(steps):
            yield step

    def _next(self, steps: Iterator[Sequence[MicroBatch]] | None) -> Sequence[MicroBatch]:
        """Returns the micro-batches of the next step on all ranks; empty after the last step."""
        flat: dict[str, Tensor] = {}
        if steps is not None:
            read = self._or_tell(lambda: next(steps, ()))
            for index, batch in enumerate(read):
                flat[f"{index} "] = torch.tensor([batch.samples, batch.tokens])
                flat |= {f"{index} {name}": tensor for name, tensor in batch.fields.items()}
        found: list[MicroBatch] = []
        for key, tensor in self._sent(flat).items():
            if key == _WORDS:
                self._heard({key: tensor})
            number, name = key.split(" ", 1)
            if name:
                found[int(number)] = found[int(number)].with_fields(**{name: tensor})
            else:
                found.append(MicroBatch({}, *tensor.tolist()))
        return found

    def _or_tell(self, read: Callable[[], Read]) -> Read:
        """Returns the result of ``read``; sends an error to the other ranks before raising it."""
        try:
            return read()
        except Exception as error:
            self._tell({"error": str(error) or type(error).__name__})
            raise

    def _tell(self, words: dict[str, Any]) -> None:
        text = bytearray(json.dumps(words).encode())
        self._sent({_WORDS: torch.frombuffer(text, dtype=torch.uint8)})

    def _heard(self, sent: dict[str, Tensor]) -> dict[str, Any]:
        words: dict[str, Any] = json.loads(bytes(sent[_WORDS].tolist()))
        if "error" in words:
            raise TrainError(words["error"])
        return words

    def _sent(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the reading rank's tensors, sent over its pipeline rank, then the pipeline."""
        send = partial(broadcast_tensors, device=self._mesh.device, purpose=PURPOSE)
        if self._mesh.axis("pp").index == 0:
            tensors = send(tensors, self._mesh.axis("tp_cp"))
        return send(tensors, self._mesh.axis("pp"))
