"""Do all ranks mean the same thing? Asked through the store, before any collective.

Ranks that disagree about the layout, the configuration or a tensor's shape otherwise meet in a
collective, where the outcome is an abort inside the library, a hang, or silently wrong numbers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from megatron_parallel import _compat
from megatron_parallel.layout import LayoutError


def agree(
    store: _compat.Store,
    topic: str,
    values: Mapping[str, str],
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    ranks: Sequence[int] | None = None,
) -> None:
    """Return once all ranks have given equal `values`; otherwise raise `LayoutError` on every rank.

    `ranks` are those that are asked, by default the whole world; the first of them collects
    and publishes the verdict, so that the store serves O(number of ranks) requests. The error names
    the ranks and the values, or the ranks that have not arrived within `timeout`. May be called
    again with the same `topic`: calls are counted in the store, per rank.
    """
    turn = store.add(f"agree/{topic}/turns/{rank}", 1)
    base = f"agree/{topic}/{turn}"
    store.set(f"{base}/{rank}", json.dumps(dict(values)))
    deadline = time.monotonic() + timeout.total_seconds()
    members = range(world_size) if ranks is None else ranks
    if rank == members[0]:
        verdict = _judge(store, base, members, deadline)
        store.set(f"{base}/verdict", verdict or "agreed")
    else:
        found = _read(store, f"{base}/verdict", deadline)
        if found is None:
            absent = [r for r in members if not store.check([f"{base}/{r}"])]
            verdict = _absence(absent or [members[0]], len(members))
        else:
            verdict = "" if found == "agreed" else found
    if verdict:
        raise LayoutError(verdict)


def _judge(store: _compat.Store, base: str, members: Sequence[int], deadline: float) -> str:
    """Empty if all agree, else the line every rank will report."""
    answers: list[dict[str, str]] = []
    missing = []
    for rank in members:
        text = _read(store, f"{base}/{rank}", deadline)
        if text is None:
            missing.append(rank)
        answers.append({} if text is None else json.loads(text))
    if missing:
        return _absence(missing, len(members))
    keys = dict.fromkeys(key for answer in answers for key in answer)
    differences = []
    for key in keys:
        by_value: dict[str, list[int]] = {}
        for rank, answer in zip(members, answers, strict=True):
            by_value.setdefault(answer.get(key, "not given"), []).append(rank)
        if len(by_value) > 1:
            sides = [f"{rank_list(ranks)}: {value}" for value, ranks in by_value.items()]
            differences.append(f"ranks disagree on {key}: " + "; ".join(sides))
    return " | ".join(differences)


def _absence(missing: list[int], asked: int) -> str:
    return f"{rank_list(missing)} of {asked} did not arrive in time: see their own output"


def _read(store: _compat.Store, key: str, deadline: float) -> str | None:
    left = max(0.01, deadline - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=left))
    except (DistStoreError, RuntimeError):  # TCPStore raises the first, FileStore the second
        return None
    return store.get(key).decode()


def rank_list(ranks: Sequence[int]) -> str:
    """Ascending ranks in words: `rank 3`, `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
