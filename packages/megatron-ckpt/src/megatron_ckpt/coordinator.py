"""How the ranks of a run agree on a save or a load: all of them, or none with the reason.

The store needs two exchanges of small picklable objects. Whoever has another way of talking than
`torch.distributed` gives an object with these four members.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megatron_ckpt.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Local = TypeVar("Local")
Agreed = TypeVar("Agreed")


class Coordinator(Protocol):
    """The ranks that save or load together. Every rank calls every method in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value, by rank, on rank 0; None elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""


class SingleProcess:
    """The coordinator of a run with one process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return the value."""
        return value


class DistributedCoordinator:
    """The ranks of a `torch.distributed` process group (the default group if none is given).

    A Gloo group is best: with NCCL the objects travel through GPU memory. The group's time-out
    bounds every wait; a rank that dies raises torch's error on the others, and what was written
    so far is cleared by the next save.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on the group's rank 0; None elsewhere."""
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of the group's rank 0."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


def exchange(
    coordinator: Coordinator,
    local: Callable[[], Local],
    lead: Callable[[list[Local]], Agreed],
) -> Agreed:
    """Run ``local`` on every rank, then ``lead`` on rank 0 with all results, by rank.

    Every rank returns what ``lead`` returned, or, if ``local`` failed on any rank or ``lead``
    failed, every rank raises: the first failing rank its own exception, all others a
    `CheckpointError` with that rank and its message. So all ranks raise the same kind of error and
    can go on alike.
    """
    failure: Exception | None = None
    result: Local | None = None
    try:
        result = local()
    except Exception as error:  # noqa: BLE001 - raised below, after the other ranks were told
        failure = error
    outcomes = coordinator.gather((result, _describe(failure)))
    verdict: tuple[Any, tuple[int, str, bool] | None] = (None, None)
    if outcomes is not None:
        failed = [(rank, *problem) for rank, (_, problem) in enumerate(outcomes) if problem]
        if failed:
            verdict = (None, failed[0])
        else:
            try:
                verdict = (lead([value for value, _ in outcomes]), None)
            except Exception as error:  # noqa: BLE001 - as above
                failure = error
                verdict = (None, (0, *_describe(error)))  # type: ignore[misc]
    agreed, problem = coordinator.broadcast(verdict)
    if problem is not None:
        rank, message, corrupt = problem
        if rank == coordinator.rank and failure is not None:
            raise failure
        kind = CorruptCheckpointError if corrupt else CheckpointError
        raise kind(f"rank {rank}: {message}") from failure
    return agreed  # type: ignore[no-any-return]


def _describe(error: Exception | None) -> tuple[str, bool] | None:
    if error is None:
        return None
    known = isinstance(error, ValueError | OSError)  # meant for people; others are bugs
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return message, isinstance(error, CorruptCheckpointError)
