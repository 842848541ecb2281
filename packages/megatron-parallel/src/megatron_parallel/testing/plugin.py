"""pytest fixtures around :class:`WorkerPool`; pytest loads them where the package is installed.

``worker_pool`` is a pool of Gloo workers on the CPU. ``device_pool`` has one rank per CUDA device,
joined by NCCL, and skips its tests where there are fewer than two. Both live until the end of the
test run. Override the fixture ``worker_pool_typecheck`` in a ``conftest.py`` to return the packages
whose jaxtyping annotations are to be checked inside the ranks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from megatron_parallel.testing.pool import WorkerPool

_MAX_RANKS = 8


class _Pools:
    """The pools of one test run, by what they check."""

    def __init__(self) -> None:
        self.pools: dict[tuple[str, tuple[str, ...]], WorkerPool] = {}

    def get(self, device: str, ranks: int, typecheck: tuple[str, ...]) -> "WorkerPool":
        from megatron_parallel.testing.pool import WorkerPool

        key = device, typecheck
        if key not in self.pools:
            self.pools[key] = WorkerPool(
                ranks,
                device=device,
                typecheck=typecheck,
                # Rewritten asserts refer to pytest; the others take seconds to import.
                preload=["pytest", "torch.distributed.tensor", "torch.distributed.pipelining"],
            )
        return self.pools[key]


@pytest.fixture(scope="session")
def _worker_pools() -> Iterator[_Pools]:
    pools = _Pools()
    yield pools
    for pool in pools.pools.values():
        pool.close()


@pytest.fixture(scope="module")
def worker_pool_typecheck() -> tuple[str, ...]:
    """Packages whose jaxtyping annotations are checked inside ranks; override to name some."""
    return ()


@pytest.fixture(scope="module")
def worker_pool(_worker_pools: _Pools, worker_pool_typecheck: tuple[str, ...]) -> "WorkerPool":
    """A pool of up to eight Gloo ranks on the CPU, shared by the whole test run."""
    return _worker_pools.get("cpu", _MAX_RANKS, tuple(worker_pool_typecheck))


@pytest.fixture(scope="module")
def device_pool(_worker_pools: _Pools) -> "WorkerPool":
    """A pool with one rank per CUDA device over NCCL; skips where there are fewer than two."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 CUDA devices, this machine has {count}")
    return _worker_pools.get("cuda", count, ())
