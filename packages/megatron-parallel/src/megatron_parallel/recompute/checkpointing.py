"""Activation checkpointing: functions whose activations are recomputed in the backward pass.

No state of a random number generator is saved. Dropout here is a hash of an element's position
(`megatron_parallel.dropout`), so the recomputation drops the same elements, in every layout. A
function that draws random numbers in another way must not be recomputed.

Collectives of the function run again in the backward pass, in the same order on all ranks of an
axis. The recomputation stops as soon as it has all tensors that autograd needs, so later operations
(the last reduction of a layer, for instance) are not repeated.
"""

from collections.abc import Callable, Iterator, Sequence
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
    """Returns `function(*inputs)`; saves only `inputs` and recomputes the rest in backward.

    The function may use other tensors, which it keeps alive but which `hooks` do not see. It must
    give the same result every time. Without gradients nothing is saved or recomputed.

    Args:
        function: Returns one tensor.
        *inputs: Its arguments.
        hooks: How the inputs are saved, e.g. `ShardSavedTensors(axis)`. Defaults to as they are.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    with nullcontext() if hooks is None else hooks.enabled():
        # Inner hooks replace outer ones, so `hooks` see the inputs only.
        result: Tensor = checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=False
        )
    return result


@contextmanager
def discard_output(y: Float[Tensor, "..."], recompute: Callable[[], Tensor]) -> Iterator[None]:
    """Discards `y`, which operations in the `with` block save; their backward recomputes it.

    For an output that is large, cheap to compute, and needed by the next layer only (a norm's).
    Frees its memory once no other code holds it.

    Args:
        y: The tensor: contiguous, in memory of its own. Views of it are discarded, too.
        recompute: Returns `y` again, without gradients; the inputs that it uses stay alive.
    """
    with discard_outputs((y,), lambda: (recompute(),)):
        yield


@contextmanager
def discard_outputs(
    outputs: Sequence[Float[Tensor, "..."]],
    recompute: Callable[..., Sequence[Tensor]],
    *inputs: Float[Tensor, "..."],
) -> Iterator[None]:
    """Discards several tensors, as `discard_output` does; one recomputation returns all of them.

    Args:
        outputs: The tensors: contiguous, each in memory of its own.
        recompute: Returns them again from `inputs`, without gradients.
        *inputs: Its arguments, which are saved as operations outside the block save theirs.
    """
    if not torch.is_grad_enabled():
        yield
        return
    outer = _compat.active_saved_tensors_hooks()
    put, take = outer or (lambda t: t.detach(), lambda t: t)
    held = [put(t) for t in inputs]
    number_of = {t.untyped_storage()._cdata: number for number, t in enumerate(outputs)}
    ready: dict[int, Tensor] = {}
    discarded = set[int]()

    def pack(t: Tensor) -> Any:
        number = number_of.get(t.untyped_storage()._cdata)
        if number is None:
            return put(t), None
        discarded.add(number)
        return number, (t.shape, t.stride(), t.storage_offset())

    def unpack(packed: Any) -> Tensor:
        other, view = packed
        if view is None:
            saved: Tensor = take(other)
            return saved
        if other not in ready:
            with torch.no_grad():
                found = recompute(*map(take, held))
            ready.update((number, found[number]) for number in discarded)
        return ready.pop(other).as_strided(*view)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
