"""What Triton needs to compile kernels for an H100 on a machine without a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver:
    """The answers of a driver to the compiler.

    Args:
        device: Device of the tensors that kernels get.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)

    def get_current_device(self) -> int:
        """Returns the number of the device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Returns the number of the stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Returns what kernels are compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Returns the device of the tensors."""
        return self._device


def compile_only() -> list[tuple[Any, Any]]:
    """Makes launches compile their kernel and not run it, in the rest of this process.

    Returns:
        Each kernel that was launched, and what it was compiled to, so far.
    """
    driver.set_active(Driver())
    compiled = list[tuple[Any, Any]]()

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled.append((kernel, kernel.warmup(*arguments, grid=grid, **options)))

        return launch

    JITFunction.__getitem__ = launcher
    return compiled
