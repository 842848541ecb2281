"""Fixtures of the integration tests."""

import pytest
from megatron_parallel.testing import WorkerPool


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=str
)
def rank_pool(request: pytest.FixtureRequest) -> WorkerPool:
    """Ranks on the CPU over Gloo and, under ``nox -s gpu``, on all CUDA devices over NCCL."""
    return request.getfixturevalue("worker_pool" if request.param == "cpu" else "device_pool")
