"""What torch's autograd engine tells about a backward pass, and who keeps what for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def gradient_wanted(ctx: Any, index: int) -> bool:
    """Returns whether the backward pass under way needs a function's gradient of its input `index`.

    `ctx.needs_input_grad` says whether any pass does; a split one needs some at a time. `index`
    counts the inputs that are tensors, which must come first.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except RuntimeError:  # torch does not say so of a leaf that autograd.grad was asked for
        return True


def gradient_returned(ctx: Any, index: int) -> bool:
    """Whether the backward pass under way returns the gradient of a leaf, a function's input.

    That is `torch.autograd.grad`; `backward` adds it to `.grad` and calls hooks. `index` counts as
    in `gradient_wanted`.
    """
    try:
        torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:  # torch refuses to answer for such a leaf, and for no other
        return True
    return False


def force_eager() -> AbstractContextManager[object]:
    """In the `with` block, functions that torch.compile has compiled run as they were written."""
    from torch.compiler import set_stance

    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance


def active_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost `saved_tensors_hooks` in force, which hooks entered from now on replace."""
    from torch._C import _autograd

    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = _autograd._top_saved_tensors_default_hooks(False)
    return found


def weak_storage_ref(storage: torch.UntypedStorage) -> Any:
    """Returns a reference that does not keep a storage; its `expired()` says whether others do."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def resolve_weak_storage(weak: Any) -> torch.UntypedStorage | None:
    """Returns the storage that `weak_storage_ref` refers to, unless it is gone."""
    found: torch.UntypedStorage | None
    found = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found
