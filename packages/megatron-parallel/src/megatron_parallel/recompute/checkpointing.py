"""Functions whose inner activations are not kept: they run again in the backward pass.

No state of a random number generator is stashed. Dropout here is a hash of where an element stands
(`megatron_parallel.dropout`), so the second run drops what the first one dropped, in every layout.
A function that draws random numbers of any other kind must not be run again.

What is communicated in the function is communicated again in the backward pass, in the same order
on all ranks of an axis. The second run ends as soon as all that autograd asks for is there, so what
comes after (the last sum of a layer, for instance) is not repeated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_parallel import _compat
from megatron_parallel.recompute.saved_tensors import SavedTensorsHooks


def activation_checkpoint(
    function: Callable[..., Tensor],
    *inputs: Float[Tensor, "..."],
    hooks: SavedTensorsHooks | None = None,
) -> Float[Tensor, "..."]:
    """`function(*inputs)`, of which only `inputs` are kept; `hooks` says how.

    The function may use other tensors, which it keeps alive but which are not packed; it must give
    the same result when it is called again. Without gradients nothing is kept and nothing runs
    again.

    Args:
        function: Gives one tensor.
        *inputs: What it is called with.
        hooks: How the inputs are packed, e.g. `ShardSavedTensors(axis)`; by default as they are.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    with nullcontext() if hooks is None else hooks.enabled():
        # Inner hooks replace outer ones: `hooks` see the inputs only.
        result: Tensor = checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=False
        )
    return result


@contextmanager
def discard_output(y: Float[Tensor, "..."], recompute: Callable[[], Tensor]) -> Iterator[None]:
    """In the `with` block, whoever keeps `y` for its backward pass gets `recompute()` instead.

    For an output that is large, cheap to make, and needed by the next layer only (a norm's). Frees
    its memory once nobody else holds it.

    Args:
        y: What is not kept, nor any view of it: contiguous, in memory of its own.
        recompute: Makes it again, without gradients; the inputs it uses stay alive.
    """
    if not torch.is_grad_enabled():
        yield
        return
    outer = _compat.active_saved_tensors_hooks()
    put, take = outer or (lambda t: t.detach(), lambda t: t)
    storage = y.untyped_storage()._cdata

    def pack(t: Tensor) -> Any:
        if t.untyped_storage()._cdata == storage:
            return None, (t.shape, t.stride(), t.storage_offset())
        return put(t), None

    def unpack(packed: Any) -> Tensor:
        other, view = packed
        if view is None:
            kept: Tensor = take(other)
            return kept
        with torch.no_grad():
            return recompute().as_strided(*view)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
