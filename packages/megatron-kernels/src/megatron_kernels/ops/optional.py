"""Asking for an optional library from within a backend's `refusal`."""

from megatron_kernels._compat import constant_to_compiler
from megatron_kernels.availability import why_not


@constant_to_compiler
def missing(name: str) -> str | None:
    """Why the named library cannot be used, None when it can; a constant to torch.compile."""
    return why_not(name)
