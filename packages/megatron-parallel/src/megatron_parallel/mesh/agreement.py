"""Comparison of values between ranks through the store, before any collective.

If ranks disagree about the layout, the configuration or the shape of a tensor, a collective aborts
inside the library, hangs or returns wrong numbers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

from torch.distributed import DistStoreError

from megatron_parallel.errors import CollectiveError, LayoutError, backend_text, rank_list
from megatron_parallel.mesh.store import BoundedStore, StoreError

_EQUAL: Final = "equal"
_OWN: Final = "own"

_READING: Final = 10.0
"""Seconds for which the first rank, which may keep the store, waits until others have read why it
raises."""


def agree(
    store: BoundedStore,
    topic: str,
    values: Mapping[str, str],
    *,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    axis: str = "world",
    own: Mapping[str, str | None] | None = None,
) -> None:
    """Verifies that all ranks give equal values. Either all ranks return, or all ranks raise.

    The first of `ranks` collects the values and publishes the verdict, so the number of requests is
    proportional to the number of ranks. The store counts the calls of each rank, so a `topic` can
    be used again.

    Args:
        store: Store of the job.
        topic: What is compared, in words.
        values: Values that must be equal on all ranks, by name.
        rank: This rank.
        ranks: Ranks of `axis`.
        timeout: Time-out of the comparison.
        axis: Name of the axis, for errors.
        own: Values that no two ranks may share, by name. Several ranks may have None.

    Raises:
        LayoutError: Values differ, or two ranks share one of `own`. The error names the values and
            the ranks.
        CollectiveError: A rank does not join within `timeout`, or the store is lost.
    """
    where = f"the comparison of {topic} on axis {axis!r} ({rank_list(ranks)})"
    given = {_EQUAL: values, _OWN: own or {}}
    try:
        verdict = _verdict(store, f"agree/{topic}/{axis}/{ranks[0]}", given, rank, ranks, timeout)
    except RuntimeError as error:  # every failure of a store is a RuntimeError
        state = "frozen" if isinstance(error, StoreError) else "gone"
        cause = backend_text(error)
        raise CollectiveError(
            f"rank 0, which keeps the job's store, is {state}: {where} failed ({cause})"
        ) from error
    if verdict.missing:
        raise CollectiveError(
            f"{rank_list(verdict.missing)} did not join {where} within "
            f"{timeout.total_seconds():g} s: dead, suspended or late, see its own output"
        )
    if verdict.differences:
        raise LayoutError(verdict.differences)


class _Verdict(NamedTuple):
    missing: list[int]
    differences: str

    @property
    def fails(self) -> bool:
        """Whether the ranks raise."""
        return bool(self.missing or self.differences)


def _verdict(
    store: BoundedStore,
    topic: str,
    given: Mapping[str, Mapping[str, str | None]],
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
) -> _Verdict:
    call = store.add(f"{topic}/turns/{rank}", 1)
    base = f"{topic}/{call}"
    store.set(f"{base}/{rank}", json.dumps({kind: dict(values) for kind, values in given.items()}))
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == ranks[0]:
        verdict = _judge(store, base, ranks, deadline)
        store.set(f"{base}/verdict", json.dumps(verdict))
        if verdict.fails:
            until = time.monotonic() + _READING
            for other in set(ranks) - {rank, *verdict.missing}:
                _read(store, f"{base}/read/{other}", until)
        return verdict
    found = _read(store, f"{base}/verdict", deadline)
    if found is None:
        absent = [r for r in ranks if not store.check([f"{base}/{r}"])]
        return _Verdict(absent or [ranks[0]], "")
    verdict = _Verdict(*json.loads(found))
    if verdict.fails:
        store.set(f"{base}/read/{rank}", "yes")
    return verdict


def _judge(store: BoundedStore, base: str, ranks: Sequence[int], deadline: float) -> _Verdict:
    answers: dict[int, dict[str, dict[str, str | None]]] = {}
    missing = []
    for rank in ranks:
        text = _read(store, f"{base}/{rank}", deadline)
        if text is None:
            missing.append(rank)
        else:
            answers[rank] = json.loads(text)
    if missing:
        return _Verdict(missing, "")
    differences = []
    for key, sides in _ranks_by_value(answers, _EQUAL).items():
        if len(sides) > 1:
            texts = [f"{rank_list(side)}: {value}" for value, side in sides.items()]
            differences.append(f"ranks disagree on {key}: " + "; ".join(texts))
    for key, sides in _ranks_by_value(answers, _OWN).items():
        texts = [
            f"{rank_list(side)} share {value}"
            for value, side in sides.items()
            if value is not None and len(side) > 1
        ]
        if texts:
            differences.append(f"every rank needs a {key} of its own: " + "; ".join(texts))
    return _Verdict([], " | ".join(differences))


def _ranks_by_value(
    answers: Mapping[int, Mapping[str, Mapping[str, str | None]]], kind: str
) -> dict[str, dict[str | None, list[int]]]:
    """Returns the ranks that gave each value, by key and value."""
    absent = "not given" if kind == _EQUAL else None
    found: dict[str, dict[str | None, list[int]]] = {}
    for key in dict.fromkeys(key for answer in answers.values() for key in answer[kind]):
        for rank, answer in answers.items():
            found.setdefault(key, {}).setdefault(answer[kind].get(key, absent), []).append(rank)
    return found


def _read(store: BoundedStore, key: str, deadline: float) -> str | None:
    left = max(0.01, deadline - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=left))
    except StoreError:
        raise
    except (DistStoreError, RuntimeError):  # TCPStore raises the first, FileStore the second
        return None
    return store.get(key).decode()
