"""Kernels of Adam that update many tensors in one launch: our own, and those of two libraries.

Ours is `megatron_optim.triton_adam`. Apex and Transformer Engine have the same functions. Their
names, arguments and dtypes are those of ``csrc/multi_tensor_adam.cu`` in NVIDIA's Apex, which
Transformer Engine took over. They compute in fp32 on CUDA devices. Their norms also sum in fp32, so
the norm of the gradient is always computed by `megatron_optim.clip`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.triton_adam import TritonAdam
from megatron_optim.update_rule import UnreadStep

LIBRARIES: Final[Mapping[str, tuple[str, str]]] = {
    "apex": ("apex.multi_tensor_apply", "amp_C"),
    "transformer-engine": ("transformer_engine.pytorch.optimizers",) * 2,
}
"""The modules with ``multi_tensor_applier`` and with the kernels, by the name of the library."""


class AdamKernel(Protocol):
    """Adam by a multi-tensor kernel; for the arguments see `MultiTensorAdam`."""

    @property
    def rounds(self) -> bool:
        """Whether `update_unread` rounds parameters into ``step.rounded``."""

    def update(
        self,
        tensors: Sequence[Sequence[Tensor]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        step: int,
        decoupled: bool,
        weight_decay: float,
    ) -> None:
        """Updates parameters and moments in place."""

    def update_unread(
        self,
        tensors: Sequence[Sequence[Tensor]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        step: UnreadStep,
        decoupled: bool,
        weight_decay: float,
    ) -> None:
        """Updates parameters and moments in place, unless the device skips the step."""


class MultiTensorAdam(NamedTuple):
    """Adam by the kernels of a library.

    Attributes:
        apply: Calls a kernel with a flag, lists of tensors and its arguments.
        adam: The kernel for numbers that the host has.
        adam_capturable: The kernel for numbers that are on the device.
    """

    apply: Callable[..., Any]
    adam: Callable[..., Any]
    adam_capturable: Callable[..., Any]

    @property
    def rounds(self) -> bool:
        """False: the kernels of the libraries round nothing into other tensors."""
        return False

    @classmethod
    def load(cls, library: str) -> "MultiTensorAdam":
        """Returns the kernels of a library.

        Args:
            library: A name in `LIBRARIES`.

        Raises:
            OptimError: The library is not installed, or lacks a function.
        """
        applier, kernels = LIBRARIES[library]
        try:
            return cls(
                import_module(applier).multi_tensor_applier,
                import_module(kernels).multi_tensor_adam,
                import_module(kernels).multi_tensor_adam_capturable,
            )
        except (ImportError, AttributeError, OSError) as error:
            raise _missing(library, error, "install it with its CUDA extensions") from error

    def update(
        self,
        tensors: Sequence[Sequence[Tensor]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        step: int,
        decoupled: bool,
        weight_decay: float,
    ) -> None:
        """Updates parameters and moments in place.

        Args:
            tensors: Gradients, parameters and both moments, all float32 on one CUDA device.
            lr: The learning rate.
            betas: The decay rates of the moments.
            eps: The term added to the denominator.
            step: The number of the update, from 1.
            decoupled: Whether weight decay is decoupled from the gradient.
            weight_decay: The weight decay.
        """
        lists = _without_empty(tensors)
        if not lists[0]:
            return
        flag = torch.zeros(1, dtype=torch.int32, device=lists[0][0].device)
        mode, corrects_bias = int(decoupled), 1
        numbers = (lr, *betas, eps, step, mode, corrects_bias, weight_decay)
        self.apply(self.adam, flag, lists, *numbers)

    def update_unread(
        self,
        tensors: Sequence[Sequence[Tensor]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        step: UnreadStep,
        decoupled: bool,
        weight_decay: float,
    ) -> None:
        """Updates parameters and moments like `update`, unless the device skips the step.

        Args:
            tensors: As for `update`; the gradients are divided by ``step.divisor``.
            lr: As for `update`.
            betas: As for `update`.
            eps: As for `update`.
            step: The numbers of the step on the device.
            decoupled: As for `update`.
            weight_decay: As for `update`.
        """
        lists = _without_empty(tensors)
        if not lists[0]:
            return
        flag, number = step.skip.to(torch.int32).view(1), step.number.to(torch.int32).view(1)
        rate = torch.full((1,), lr, dtype=torch.float32, device=flag.device)
        divisor = step.divisor
        factor = torch.ones_like(rate) if divisor is None else divisor.reciprocal().view(1)
        mode, corrects_bias = int(decoupled), 1
        numbers = (rate, *betas, eps, number, mode, corrects_bias, weight_decay, factor)
        self.apply(self.adam_capturable, flag, lists, *numbers)


def load_kernel(library: str) -> AdamKernel:
    """Returns a kernel.

    Args:
        library: ``triton`` for our own, or a name in `LIBRARIES`.

    Raises:
        OptimError: A library is not installed, or lacks a function.
    """
    if library != "triton":
        return MultiTensorAdam.load(library)
    try:
        return TritonAdam.load()
    except (ImportError, AttributeError, OSError) as error:
        raise _missing(library, error, "install it") from error


def check_tensors(
    library: str, tensors: Mapping[str, Tensor], devices: Sequence[str] = ("cuda",)
) -> None:
    """Refuses parameters that the kernels cannot update, or not in the precision of the run.

    Args:
        library: The name of the library.
        tensors: The main parameters by name.
        devices: The types of devices that the kernels run on. Defaults to CUDA devices.

    Raises:
        OptimError: A parameter is float64, not contiguous, or on another device.
    """
    for name, tensor in tensors.items():
        wrong = ""
        if tensor.dtype == torch.float64:
            wrong = f"computes in fp32, but parameter {name!r} is float64"
        elif not tensor.is_contiguous():
            wrong = f"updates contiguous tensors, but parameter {name!r} is not contiguous"
        elif tensor.device.type not in devices:
            wrong = f"runs on CUDA devices, but parameter {name!r} is updated on a "
            wrong += "CPU" if tensor.device.type == "cpu" else tensor.device.type
        if wrong:
            raise OptimError(
                f"{{kernels:name}} is {library}, which {wrong}; use torch", {"kernels": library}
            )


def _missing(library: str, error: Exception, remedy: str) -> OptimError:
    reason = " ".join(str(error).split())
    return OptimError(
        f"{{kernels:name}} is {library}, which has no multi-tensor kernels here: {reason}; "
        f"{remedy}, or use torch",
        {"kernels": library},
    )


def _without_empty(tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Returns lists without empty tensors, which the kernels do not count as finished work."""
    kept = [number for number, tensor in enumerate(tensors[0]) if tensor.numel()]
    return [[each[number] for number in kept] for each in tensors]
