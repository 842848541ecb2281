"""pytest fixtures for `WorkerPool`, which pytest loads if the package is installed.

``worker_pool`` is a pool of Gloo ranks on the CPU. ``device_pool`` has one rank per CUDA device,
joined by NCCL, and skips its tests if there are fewer than two devices. Both live until the end of
the test run. These fixtures can be overridden in a ``conftest.py``: ``worker_pool_typecheck``
returns the packages whose jaxtyping annotations are checked inside the ranks,
``worker_pool_preload`` returns modules to import once, before ranks are forked.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from megatron_parallel.testing.pool import WorkerPool

_MAX_RANKS = 8
# Rewritten asserts refer to pytest; importing the others takes seconds.
_PRELOAD = ("pytest", "torch.distributed.tensor", "torch.distributed.pipelining")


class _Pools:
    """The pools of one test run, by device, checked packages and preloaded modules."""

    def __init__(self) -> None:
        self.pools: dict[tuple[str, tuple[str, ...], tuple[str, ...]], WorkerPool] = {}

    def get(
        self,
        device: str,
        ranks: int,
        typecheck: tuple[str, ...] = (),
        preload: tuple[str, ...] = (),
    ) -> "WorkerPool":
        from megatron_parallel.testing.pool import WorkerPool

        key = device, typecheck, preload
        if key not in self.pools:
            self.pools[key] = WorkerPool(
                ranks, device=device, typecheck=typecheck, preload=[*_PRELOAD, *preload]
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
    """Packages whose jaxtyping annotations are checked inside ranks. Defaults to none."""
    return ()


@pytest.fixture(scope="module")
def worker_pool_preload() -> tuple[str, ...]:
    """Modules to import once, before ranks are forked. Defaults to none."""
    return ()


@pytest.fixture(scope="module")
def worker_pool(
    _worker_pools: _Pools,
    worker_pool_typecheck: tuple[str, ...],
    worker_pool_preload: tuple[str, ...],
) -> "WorkerPool":
    """Pool of up to eight Gloo ranks on the CPU, shared by the whole test run."""
    checked, preload = tuple(worker_pool_typecheck), tuple(worker_pool_preload)
    return _worker_pools.get("cpu", _MAX_RANKS, checked, preload)


@pytest.fixture(scope="module")
def device_pool(_worker_pools: _Pools) -> "WorkerPool":
    """Pool with one NCCL rank per CUDA device. Skips the test if there are fewer than two."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 CUDA devices, this machine has {count}")
    return _worker_pools.get("cuda", count)
