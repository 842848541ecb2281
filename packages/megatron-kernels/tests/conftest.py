"""Checks tensor annotations at run time while the tests of this package run."""

from jaxtyping import install_import_hook

install_import_hook("megatron_kernels.ops", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)
