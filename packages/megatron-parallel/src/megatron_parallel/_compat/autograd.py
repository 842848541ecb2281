"""Queries of torch's autograd engine about a backward pass and about saved tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def gradient_wanted(ctx: Any, index: int) -> bool:
    """Returns whether the running backward pass needs a function's gradient of its input `index`.

    `ctx.needs_input_grad` covers every pass; a split backward pass needs some gradients in each
    half. `index` counts the inputs that are tensors, which must come first.
    """
    if not ctx.needs_input_grad[index]:
        return False
    if torch.compiler.is_compiling():  # compiled code computes all gradients in one pass
        return True
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except RuntimeError:  # torch raises for a leaf among the inputs of autograd.grad
        return True


def gradient_returned(ctx: Any, index: int) -> bool:
    """Returns whether the running backward pass returns the gradient of a leaf, a function's input.

    `torch.autograd.grad` does; `backward` adds it to `.grad` and calls hooks. `index` counts as in
    `gradient_wanted`.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:  # torch raises for such a leaf, and for no other
        return True
    return False


def force_eager() -> AbstractContextManager[object]:
    """Returns a context in which functions compiled by torch.compile run eagerly."""
    from torch.compiler import set_stance

    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance


def active_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the innermost active `saved_tensors_hooks`, which hooks entered later replace."""
    from torch._C import _autograd

    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = _autograd._top_saved_tensors_default_hooks(False)
    return found


def storage_identity(tensor: torch.Tensor) -> int:
    """Returns a number that tensors share if they are views of the same memory.

    Unlike an address it exists on imagined devices too.
    """
    return int(tensor.untyped_storage()._cdata)


def weak_storage_ref(storage: torch.UntypedStorage) -> Any:
    """Returns a weak reference to a storage; its `expired()` tests whether the storage is freed."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
