"""Checks tensor annotations at run time, in the tests and in the ranks of the worker pool."""

from checked_shapes import check_shapes

MODULES = (
    "collectives.operations",
    "collectives.packed",
    "context_parallel",
    "data_parallel",
    "dropout",
    "expert_parallel",
    "sharding.initialization",
    "sharding.views",
    "tensor_parallel",
)
TENSOR_MODULES = tuple(f"megatron_parallel.{name}" for name in MODULES)
check_shapes(TENSOR_MODULES)

import pytest  # noqa: E402
from megatron_parallel import Mesh, ParallelLayout  # noqa: E402
from megatron_parallel.testing import WorkerPool  # noqa: E402
from waiting import HANG  # noqa: E402


@pytest.fixture(scope="module")
def worker_pool_typecheck() -> tuple[str, ...]:
    return TENSOR_MODULES


@pytest.fixture(scope="module")
def worker_pool_preload() -> tuple[str, ...]:
    return (*TENSOR_MODULES, "megatron_parallel.mesh.mesh", "megatron_parallel.pipeline")


@pytest.fixture
def single() -> Mesh:
    return Mesh.single()


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"tp{size}")
def tensor_ranks(request: pytest.FixtureRequest) -> list[Mesh]:
    """Meshes without process groups of all ranks of a tensor-parallel group of size 1 to 4."""
    layout = ParallelLayout(tp=request.param).resolve(request.param)
    return [Mesh(layout, rank) for rank in range(request.param)]


@pytest.fixture
def patient(worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    """The pool with enough time for all ranks to report after one has ended."""
    monkeypatch.setattr("megatron_parallel.testing.pool._GRACE", HANG)
    return worker_pool
