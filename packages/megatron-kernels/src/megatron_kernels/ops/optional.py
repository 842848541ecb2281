"""Checks for an optional library in a backend's `unsupported_reason`."""

from megatron_kernels._compat import constant_to_compiler
from megatron_kernels.availability import unavailable_reason


@constant_to_compiler
def missing_library(name: str) -> str | None:
    """Returns why the named library cannot be used, or None; a constant to torch.compile."""
    return unavailable_reason(name)
