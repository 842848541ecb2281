"""Collectives on one GPU accept only its tensors: there is no Gloo group beside that of NCCL."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.gpu


@pytest.fixture
def alone(
    device: torch.device, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[torch.device]:
    """Starts a job of one rank with NCCL, or with Gloo on a simulated device."""
    simulated = request.config.getoption("device") == "simulated"
    dist.init_process_group(
        "gloo" if simulated else "nccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_of_the_device_is_summed(alone, dtype):
    total = torch.full((3,), 1 / 3, dtype=dtype, device=alone)
    expected = total.cpu()
    dist.all_reduce(total)
    assert torch.equal(total.cpu(), expected)


def test_a_tensor_of_the_host_is_refused(alone):
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(3))
    total = torch.ones(3, device=alone)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]
