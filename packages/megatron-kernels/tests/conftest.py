"""Checks tensor annotations at run time while the tests of this package run."""

from checked_shapes import check_shapes

check_shapes(["megatron_kernels.ops"])

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)
