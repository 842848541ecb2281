"""Asking for an optional library from within a backend's `refusal`."""

import torch

from megatron_kernels.availability import why_not


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def missing(name: str) -> str | None:
    """Why the named library cannot be used, None when it can; a constant to torch.compile."""
    return why_not(name)
