"""Checks tensor annotations at run time, and offers a small model in any precision.

Only modules that handle tensors are checked: the configuration must be free to refuse a wrong value
with an error of its own.
"""

from collections.abc import Callable

from checked_shapes import check_shapes

TENSOR_MODULES = ("clip", "mixed_precision", "optimizer", "param_groups")
check_shapes([f"megatron_optim.{name}" for name in TENSOR_MODULES])

import pytest  # noqa: E402
import torch  # noqa: E402
from megatron_parallel import Mesh, Sharding  # noqa: E402
from torch import nn  # noqa: E402


@pytest.fixture
def mesh() -> Mesh:
    return Mesh.single()


@pytest.fixture
def table() -> Callable[[nn.Module], dict[str, Sharding]]:
    """Returns the sharding table of a module that is not sharded."""

    def make(module: nn.Module) -> dict[str, Sharding]:
        return {name: Sharding(tuple(p.shape)) for name, p in module.named_parameters()}

    return make


@pytest.fixture
def model() -> Callable[..., nn.Module]:
    """Returns a small network with matrices, biases, norm gains and fixed weights."""

    def make(dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11), nn.GELU(), nn.Linear(11, 5))
        return network.to(dtype)

    return make
