"""Operations of our own Triton kernels, as torch sees them: one operation each.

A `TritonOp` names a function that launches kernels, and one that returns its outputs without
values. Autograd functions call it. torch.compile, fake tensors and the imagined device of
`megatron_parallel` see one operation, `torch.ops.megatron_kernels.<name>`, and need no Triton.
Nothing is defined and Triton is not imported before the first call.
"""

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.library import Library

from megatron_kernels._compat import constant_to_compiler, is_fake, is_plain, lacks_gpu
from megatron_kernels.availability import library, probe_installation
from megatron_kernels.registry import Backend

NAME: Final = "triton"
"""Name of the backends."""

NAMESPACE: Final = "megatron_kernels"
"""Namespace of the operations in `torch.ops`."""

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

LONGEST_ROW: Final = 2**16
"""Largest number of elements of a row that one program holds in registers."""


@dataclass(frozen=True)
class TritonOp:
    """An operation of this package for torch's dispatcher.

    Attributes:
        schema: Its signature in torch's schema language, `name(Tensor x, ...) -> Tensor`.
        kernels: Module with the function `name`, which launches the kernels. It imports Triton.
        fakes: Module with the function `name_fake`, which returns the outputs without values.
    """

    schema: str
    kernels: str
    fakes: str

    def __call__(self, *arguments: Any) -> Any:
        """Calls the operation, after defining it at the first call.

        An operation that changes none of its arguments is not sent through torch's dispatcher,
        which takes longer than a small kernel, unless something observes the dispatcher.
        """
        if not torch.compiler.is_compiling() and "!" not in self.schema and is_plain(arguments):
            return getattr(_module(self.kernels), _name(self.schema))(*arguments)
        _define(self.schema, self.kernels, self.fakes)
        name = self.schema.partition("(")[0]
        return getattr(torch.ops.megatron_kernels, name).default(*arguments)


def triton_backend(
    run: Callable[..., Any],
    unsupported_reason: Callable[..., str | None],
    description: str,
    on_request: str | None = None,
) -> Backend:
    """Returns the backend of kernels of ours, which stands before those of torch.

    Args:
        run: As for `Backend`.
        unsupported_reason: As for `Backend`.
        description: As for `Backend`.
        on_request: As for `Backend`. `NEVER_RUN` for kernels that have not passed
            `megatron-kernels check` on a GPU.
    """
    return Backend(NAME, run, unsupported_reason, description, on_request, fuses=True)


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


@functools.cache
def _name(schema: str) -> str:
    return schema.partition("(")[0]


@constant_to_compiler
def _define(schema: str, kernels: str, fakes: str) -> bool:
    """Defines an operation, once in a process."""
    return _defined(schema, kernels, fakes)


@functools.cache
def _defined(schema: str, kernels: str, fakes: str) -> bool:
    name = schema.partition("(")[0]

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module(kernels), name)(*arguments)

    owner = _library()
    owner.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    owner.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    fake = getattr(importlib.import_module(fakes), f"{name}_fake")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=owner)
    return True


@functools.cache
def _library() -> Library:
    """Returns the owner of the definitions, which end with it."""
    return Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@constant_to_compiler
def interprets() -> bool:
    """Returns whether Triton interprets kernels on CPUs: its own switch TRITON_INTERPRET is 1."""
    return _interprets()


@functools.cache
def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it once as well


@constant_to_compiler
def _not_usable() -> str | None:
    return _usability()


@functools.cache
def _usability() -> str | None:
    found = probe_installation(library("triton"))
    if found.reason is not None:
        return f"triton is {found.reason}"
    return "the driver finds no GPU" if lacks_gpu() and not interprets() else None


def contiguous_rows(x: Tensor) -> Tensor:
    """Returns a tensor whose last dim is contiguous, as kernels read it: itself or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def unsupported_reason(*tensors: Tensor | None, row: int = 0) -> str | None:
    """Returns why Triton kernels do not support these tensors, or None.

    Fake tensors need no Triton, so an imagined device has the kernels of a real one.

    Args:
        tensors: Tensors with floating-point numbers.
        row: Elements that one program must hold.
    """
    for x in tensors:
        if x is None:
            continue
        if not x.is_cuda and not (interprets() and x.device.type == "cpu"):
            return f"needs a CUDA tensor, x is on {x.device.type}"
        if x.dtype not in DTYPES:
            return f"needs floating-point numbers of 16, 32 or 64 bits, got {x.dtype}"
    if row > LONGEST_ROW:
        return f"has rows of at most {LONGEST_ROW} elements, got {row}"
    reason = _not_usable()
    if reason is not None and any(is_fake(x) for x in tensors if x is not None):
        return None
    return reason
