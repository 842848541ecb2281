"""Whether torch.compile can generate code for a GPU."""


def why_not_compiled() -> str | None:
    """Returns why torch.compile has no compiler for the GPU of this process, or None."""
    from torch.utils import _triton

    if not _triton.has_triton_package():
        return "Triton is not installed"
    return None if _triton.has_triton() else "Triton does not support this device"
