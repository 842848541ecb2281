"""Adam in one Triton kernel, which also rounds main parameters into the model: one read, one write.

For each element the kernel reads gradient, main parameter and both moments, and writes the last
three and the weight of the model: 30 bytes with bf16 weights. torch's fused kernel and a copy move
38: the kernel writes the divided gradient, and the copy reads the main parameter again. One launch
updates all tensors of a group (`megatron_optim.address_tables`).

Tensors without values (`megatron_parallel.imagined_device`) are passed to an operation of the same
name instead, `torch.ops.megatron_optim.adam`, so that it is counted.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from megatron_optim.address_tables import AddressTables
from megatron_optim.update_rule import UnreadStep

_SCHEMA = (
    "adam(Tensor[] gradients, Tensor(a!)[] parameters, Tensor(b!)[] means, Tensor(c!)[] squares, "
    "Tensor[] numbers, *, Tensor(d!)[] rounded) -> ()"
)


class TritonAdam:
    """Adam by the kernel of `megatron_optim.adam_kernel`.

    Args:
        launch: The function of that module.
    """

    rounds = True

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch
        self._tables = AddressTables()

    @classmethod
    def load(cls) -> "TritonAdam":
        """Imports Triton.

        Raises:
            ImportError: Triton is not installed.
        """
        return cls(importlib.import_module("megatron_optim.adam_kernel").launch)

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
        """Updates parameters and moments in place; as `MultiTensorAdam.update`."""
        if not tensors[0]:
            return
        number = torch.full((), step, dtype=torch.float32, device=tensors[0][0].device)
        unread = UnreadStep(number, torch.zeros_like(number), None)
        self.update_unread(
            tensors,
            lr=lr,
            betas=betas,
            eps=eps,
            step=unread,
            decoupled=decoupled,
            weight_decay=weight_decay,
        )

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
        """Updates parameters and moments, and rounds parameters into ``step.rounded``.

        The arguments are those of `MultiTensorAdam.update_unread`. A step that the device skips
        changes none of the tensors.
        """
        gradients, parameters, means, squares = tensors
        if not any(parameter.numel() for parameter in parameters):
            return
        written = [tensor for tensor in step.rounded if tensor is not None]
        if type(step.number) is not Tensor:  # it has no values
            numbers = [step.number, step.skip, *([] if step.divisor is None else [step.divisor])]
            _operation()(gradients, parameters, means, squares, numbers, rounded=written)
            return
        gradients = [each if each.is_contiguous() else each.contiguous() for each in gradients]
        self._launch(
            self._tables.of([gradients, parameters, means, squares], step.rounded),
            step.number,
            step.skip,
            step.divisor,
            lr=float(lr),
            decay=float(lr * weight_decay if decoupled else weight_decay),
            eps=float(eps),
            betas=betas,
            logarithms=[math.log(beta) if beta else -math.inf for beta in betas],
            decoupled=decoupled,
            dtypes={tensor.dtype for tensor in written},
        )
        # The kernel writes without torch's knowledge.
        torch.autograd.graph.increment_version([*parameters, *means, *squares, *written])


@functools.cache
def _operation() -> Any:
    """Returns the operation for tensors without values, which it defines once in a process."""
    owner = _library()
    owner.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake("megatron_optim::adam", _nothing, lib=owner)
    return torch.ops.megatron_optim.adam.default


@functools.cache
def _library() -> Library:
    """Returns the owner of the definition, which ends with it."""
    return Library("megatron_optim", "FRAGMENT")  # type: ignore[no-untyped-call]


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for the kernel: results have no values."""
