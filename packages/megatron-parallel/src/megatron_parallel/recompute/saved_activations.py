"""Counts the activations that a forward pass saves for the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_parallel import _compat


@dataclass
class SavedActivations:
    """Saved storages, each of them once, without parameters and buffers.

    Attributes:
        by_module: Bytes by name of the innermost module that was running when a storage was first
            saved; `""` is the module itself.
        shapes: Shape of the first tensor of each storage, in order.
    """

    by_module: dict[str, int] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(self.by_module.values())


@contextmanager
def count_saved_activations(module: nn.Module) -> Iterator[SavedActivations]:
    """Counts what autograd saves of forward passes of `module` in the `with` block.

    Does not count tensors that other hooks move out of device memory, nor tensors that a
    recomputation saves. The storages stay alive until the block ends.
    """
    saved, running = SavedActivations(), [""]
    known = {_compat.storage_identity(t) for t in (*module.parameters(), *module.buffers())}
    storages: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if _compat.storage_identity(t) not in known and storage.nbytes():
            known.add(_compat.storage_identity(t))
            storages.append(storage)
            saved.by_module[running[-1]] = saved.by_module.get(running[-1], 0) + storage.nbytes()
            saved.shapes.append(tuple(t.shape))
        return t.detach()

    with ExitStack() as stack:
        for name, submodule in module.named_modules():
            enter = submodule.register_forward_pre_hook(_entering(running, name))
            leave = submodule.register_forward_hook(_leaving(running))
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        yield saved


def _entering(running: list[str], name: str) -> Callable[..., None]:
    def enter(*_: object) -> None:
        running.append(name)

    return enter


def _leaving(running: list[str]) -> Callable[..., None]:
    def leave(*_: object) -> None:
        running.pop()

    return leave
