"""Asking for an optional library from within a backend's `unsupported_reason`."""

from megatron_kernels._compat import constant_to_compiler
from megatron_kernels.availability import unavailable_reason


@constant_to_compiler
def missing_library(name: str) -> str | None:
    """Why the named library cannot be used, None when it can; a constant to torch.compile."""
    return unavailable_reason(name)
