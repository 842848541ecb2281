"""A collective that fails says which rank it missed.

All a backend knows is that a connection broke or that nobody answered in time. The ranks that
notice write so into the job's key-value store; those that stay silent are the ones that died, froze
or are elsewhere in the program.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from megatron_parallel import _compat
from megatron_parallel.agreement import rank_list
from megatron_parallel.mesh import Axis

GRACE: Final = 2.0
"""Seconds in which the other ranks of an axis may report the same failure."""


class CollectiveError(RuntimeError):
    """A rank did not take part in a collective, or its connection broke; the job must end."""


@contextmanager
def naming_failures(axis: Axis, operation: str) -> Iterator[None]:
    """Turn a failure of the backend into a `CollectiveError` of one line.

    It names the ranks that are missing, the axis and `operation`, which is in words.
    """
    try:
        yield
    except RuntimeError as error:  # DistBackendError, DistNetworkError and Gloo's own
        raise CollectiveError(_explain(axis, operation, error)) from error


def _explain(axis: Axis, operation: str, error: RuntimeError) -> str:
    where = f"{operation} on axis {axis.name!r} ({rank_list(axis.ranks)})"
    cause = backend_text(error)
    own_key = _key(axis.ranks[axis.index])
    try:
        store = _compat.default_store()
        store.set(own_key, "")
        silent, verdicts = _reports(store, axis)
        if silent:
            verdict = f"{rank_list(silent)} did not join {where}"
            store.set(own_key, verdict)
            return f"{verdict}: dead, frozen or late, see its own output ({cause})"
    except RuntimeError:  # the store went with the rank that keeps it
        return f"rank 0, which keeps the job's store, is gone: {where} failed ({cause})"
    for rank, verdict in verdicts.items():
        return f"{where} failed because rank {rank} gave up: {verdict} ({cause})"
    return f"{where} failed on all its ranks ({cause})"


def _reports(store: _compat.Store, axis: Axis) -> tuple[list[int], dict[int, str]]:
    """Ranks of the axis that report no failure within `GRACE`; what others have found out."""
    deadline = time.monotonic() + GRACE
    while True:
        told = [rank for rank in axis.ranks if store.check([_key(rank)])]
        verdicts = {rank: store.get(_key(rank)).decode() for rank in told}
        verdicts = {rank: verdict for rank, verdict in verdicts.items() if verdict}
        silent = [rank for rank in axis.ranks if rank not in told]
        if time.monotonic() > deadline or (verdicts and not silent):
            return silent, verdicts
        time.sleep(0.05)


def _key(rank: int) -> str:
    return f"collective-failed/{rank}"


def backend_text(error: RuntimeError) -> str:
    """The first sentence of the backend's message, without the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\]\s*", "", lines[0]).split(". ")[0].rstrip(".")
