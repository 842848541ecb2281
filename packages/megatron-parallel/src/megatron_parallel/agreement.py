"""Do all ranks mean the same thing? Asked through the store, before any collective.

Ranks that disagree about the layout, the configuration or a tensor's shape otherwise meet in a
collective, where the outcome is an abort inside the library, a hang, or silently wrong numbers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError

from megatron_parallel.errors import CollectiveError, LayoutError, backend_text, rank_list
from megatron_parallel.store import BoundedStore, StoreError


def agree(
    store: BoundedStore,
    topic: str,
    values: Mapping[str, str],
    *,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    axis: str = "world",
) -> None:
    """Return once all `ranks` have given equal `values`; otherwise raise on every one of them.

    The first of `ranks`, the members of `axis`, collects and publishes the verdict, so that the
    store serves O(number of ranks) requests. May be called again with the same `topic`, which says
    in words what is compared: calls are counted in the store, per rank.

    Raises:
        LayoutError: Values differ; the line names them and the ranks.
        CollectiveError: A rank has not come within `timeout`, or the store is gone.
    """
    where = f"the comparison of {topic} on axis {axis!r} ({rank_list(ranks)})"
    try:
        verdict = _verdict(store, f"agree/{topic}/{axis}/{ranks[0]}", values, rank, ranks, timeout)
    except RuntimeError as error:  # every failure of a store is one
        state = "frozen" if isinstance(error, StoreError) else "gone"
        cause = backend_text(error)
        raise CollectiveError(
            f"rank 0, which keeps the job's store, is {state}: {where} failed ({cause})"
        ) from error
    if verdict.missing:
        raise CollectiveError(
            f"{rank_list(verdict.missing)} did not join {where} within "
            f"{timeout.total_seconds():g} s: dead, frozen or late, see its own output"
        )
    if verdict.differences:
        raise LayoutError(verdict.differences)


class _Verdict(NamedTuple):
    missing: list[int]
    differences: str


def _verdict(
    store: BoundedStore,
    topic: str,
    values: Mapping[str, str],
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
) -> _Verdict:
    turn = store.add(f"{topic}/turns/{rank}", 1)
    base = f"{topic}/{turn}"
    store.set(f"{base}/{rank}", json.dumps(dict(values)))
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == ranks[0]:
        verdict = _judge(store, base, ranks, deadline)
        store.set(f"{base}/verdict", json.dumps(verdict))
        return verdict
    found = _read(store, f"{base}/verdict", deadline)
    if found is None:
        absent = [r for r in ranks if not store.check([f"{base}/{r}"])]
        return _Verdict(absent or [ranks[0]], "")
    return _Verdict(*json.loads(found))


def _judge(store: BoundedStore, base: str, ranks: Sequence[int], deadline: float) -> _Verdict:
    answers: list[dict[str, str]] = []
    missing = []
    for rank in ranks:
        text = _read(store, f"{base}/{rank}", deadline)
        if text is None:
            missing.append(rank)
        answers.append({} if text is None else json.loads(text))
    if missing:
        return _Verdict(missing, "")
    keys = dict.fromkeys(key for answer in answers for key in answer)
    differences = []
    for key in keys:
        by_value: dict[str, list[int]] = {}
        for rank, answer in zip(ranks, answers, strict=True):
            by_value.setdefault(answer.get(key, "not given"), []).append(rank)
        if len(by_value) > 1:
            sides = [f"{rank_list(side)}: {value}" for value, side in by_value.items()]
            differences.append(f"ranks disagree on {key}: " + "; ".join(sides))
    return _Verdict([], " | ".join(differences))


def _read(store: BoundedStore, key: str, deadline: float) -> str | None:
    left = max(0.01, deadline - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=left))
    except StoreError:
        raise
    except (DistStoreError, RuntimeError):  # TCPStore raises the first, FileStore the second
        return None
    return store.get(key).decode()
