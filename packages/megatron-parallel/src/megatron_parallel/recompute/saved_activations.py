"""What a forward pass keeps for the backward pass, counted."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class SavedActivations:
    """Storages that are kept, each of them once; parameters and buffers are not among them.

    Attributes:
        by_module: bytes by name of the innermost module that was running when a storage was first
            kept; the module itself is `""`.
        shapes: shape of the first tensor of each storage, in order.
    """

    by_module: dict[str, int] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.by_module.values())


@contextmanager
def count_saved_activations(module: nn.Module) -> Iterator[SavedActivations]:
    """Counts what autograd keeps of forward passes of `module` in the `with` block.

    What other hooks have taken out of the device's memory is not counted, nor is what a function
    that runs again keeps while it does. The storages live on as long as the block.
    """
    kept, running = SavedActivations(), [""]
    known = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    held: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known and storage.nbytes():
            known.add(storage.data_ptr())
            held.append(storage)
            kept.by_module[running[-1]] = kept.by_module.get(running[-1], 0) + storage.nbytes()
            kept.shapes.append(tuple(t.shape))
        return t.detach()

    with ExitStack() as stack:
        for name, part in module.named_modules():
            enter = part.register_forward_pre_hook(_entering(running, name))
            leave = part.register_forward_hook(_leaving(running))
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        yield kept


def _entering(running: list[str], name: str) -> Callable[..., None]:
    def enter(*_: object) -> None:
        running.append(name)

    return enter


def _leaving(running: list[str]) -> Callable[..., None]:
    def leave(*_: object) -> None:
        running.pop()

    return leave
