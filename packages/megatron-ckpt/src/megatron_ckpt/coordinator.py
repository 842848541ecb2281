"""Agreement of ranks on a save or a load: all ranks succeed, or all raise the same error.

The store exchanges text between ranks twice. The text is JSON and never a pickle, so a rank
executes nothing that another rank sends. To communicate by other means than `torch.distributed`,
implement the four members of `Coordinator`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ckpt.errors import CheckpointError, CorruptCheckpointError
from megatron_ckpt.values import dumps, loads

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Coordinator(Protocol):
    """The ranks that save or load together. Every rank calls every method in the same order."""

    @property
    def rank(self) -> int:
        """The index of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def gather(self, text: str) -> list[str] | None:
        """Returns the texts of all ranks, in the order of the ranks, on rank 0; None elsewhere."""

    def broadcast(self, text: str) -> str:
        """Returns the text of rank 0 on every rank."""


class SingleProcessCoordinator:
    """The coordinator of a run with one process."""

    rank = 0
    world_size = 1

    def gather(self, text: str) -> list[str] | None:
        """Returns a list of the text."""
        return [text]

    def broadcast(self, text: str) -> str:
        """Returns the text."""
        return text


class DistributedCoordinator:
    """A coordinator for the ranks of a `torch.distributed` process group.

    Use a Gloo group; with NCCL the texts travel through GPU memory. The time-out of the group
    bounds every wait. If a rank dies, the other ranks raise torch's error, and the next save
    removes what was written.

    Args:
        group: The process group. Defaults to the default group.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, text: str) -> list[str] | None:
        """Returns the texts of all ranks on rank 0 of the group; None elsewhere."""
        import torch
        import torch.distributed as dist

        own = self._tensor(text)
        size = torch.tensor([own.numel()], device=own.device)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size, group=self.group)
        longest = max(int(one) for one in sizes)
        padded = own.new_zeros(longest)
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        dist.gather(padded, parts, group=self.group, group_dst=0)
        if parts is None:
            return None
        return [_text(part[: int(one)]) for part, one in zip(parts, sizes, strict=True)]

    def broadcast(self, text: str) -> str:
        """Returns the text of rank 0 of the group."""
        import torch
        import torch.distributed as dist

        own = self._tensor(text)
        size = torch.tensor([own.numel()], device=own.device)
        dist.broadcast(size, group=self.group, group_src=0)
        if self.rank != 0:
            own = own.new_empty(int(size))
        dist.broadcast(own, group=self.group, group_src=0)
        return _text(own)

    def _tensor(self, text: str) -> "torch.Tensor":
        """Returns the bytes of ``text`` as uint8 on a device of the group's backend."""
        import numpy as np
        import torch
        import torch.distributed as dist

        data = bytearray(text.encode("utf-8", "surrogatepass"))
        devices = [
            pair.partition(":")[0] for pair in dist.get_backend_config(self.group).split(",")
        ]
        device = "cpu" if "cpu" in devices else devices[0]
        return torch.from_numpy(np.frombuffer(data, np.uint8)).to(device)


def _text(data: "torch.Tensor") -> str:
    return data.cpu().numpy().tobytes().decode("utf-8", "surrogatepass")


_WHAT = "values exchanged by ranks"


def map_reduce(
    coordinator: Coordinator,
    map_fn: Callable[[], object],
    reduce_fn: Callable[[list[Any]], object],
) -> Any:
    """Runs ``map_fn`` on every rank and ``reduce_fn`` on rank 0, and returns its result everywhere.

    The results of both functions are sent between ranks as JSON: plain values (None, bool, int,
    float, str, bytes, list, tuple, dict), which arrive unchanged.

    Args:
        coordinator: The ranks that call this function.
        map_fn: Called without arguments on every rank.
        reduce_fn: Called on rank 0 with the results of ``map_fn``, in the order of the ranks.

    Returns:
        The result of ``reduce_fn``.

    Raises:
        CheckpointError: Another rank failed; the message names the rank and its error. If several
            ranks fail, the error of the lowest is reported.
        Exception: The exception of ``map_fn`` or ``reduce_fn``, on the rank that failed.
    """
    failure: Exception | None = None
    try:
        outcome = dumps((map_fn(), None), _WHAT)
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks have it
        failure = error
        outcome = dumps((None, _describe(error)), _WHAT)
    gathered = coordinator.gather(outcome)
    verdict = ""
    if gathered is not None:
        try:  # the other ranks wait for the verdict, so errors are caught here as well
            outcomes: list[Any] = [loads(text) for text in gathered]
            failed = [(rank, *problem) for rank, (_, problem) in enumerate(outcomes) if problem]
            agreed = None if failed else reduce_fn([value for value, _ in outcomes])
            verdict = dumps((agreed, failed[0] if failed else None), _WHAT)
        except Exception as error:  # noqa: BLE001 - as above
            failure = error
            verdict = dumps((None, (0, *_describe(error))), _WHAT)
    answer: Any = loads(coordinator.broadcast(verdict))
    agreed, problem = answer
    if problem is not None:
        rank, message, corrupt = problem
        if rank == coordinator.rank and failure is not None:
            raise failure
        kind = CorruptCheckpointError if corrupt else CheckpointError
        raise kind(f"rank {rank}: {message}") from failure
    return agreed


def _describe(error: Exception) -> tuple[str, bool]:
    known = isinstance(error, ValueError | OSError)  # messages for users; other types are bugs
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return message, isinstance(error, CorruptCheckpointError)
