"""The rank that keeps the store leaves after the others have read why."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from megatron_parallel import LayoutError
from megatron_parallel.mesh.agreement import agree


class SlowStore:
    """A store that a rank reads late, and that ends with the rank that keeps it."""

    def __init__(self, store: dist.Store, ended: threading.Event) -> None:
        self._store, self._ended = store, ended

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            if name == "wait":
                time.sleep(0.5)
            if self._ended.is_set():
                raise RuntimeError("Broken pipe")
            return method(*args)

        return call


def test_a_late_rank_reads_the_differences_before_the_store_ends() -> None:
    store, ended, found = dist.HashStore(), threading.Event(), dict[int, BaseException]()

    def run(rank: int, own: Any) -> None:
        try:
            agree(
                own,
                "shapes",
                {"size": str(rank)},
                rank=rank,
                ranks=(0, 1),
                timeout=timedelta(seconds=30),
            )
        except (LayoutError, RuntimeError) as error:
            found[rank] = error

    late = threading.Thread(target=run, args=(1, SlowStore(store, ended)))
    late.start()
    run(0, store)
    ended.set()
    late.join()
    for error in found.values():
        with pytest.raises(LayoutError, match="ranks disagree on size: rank 0: 0; rank 1: 1"):
            raise error
    assert len(found) == 2
