"""The layers of one stage in sequence, with recomputation and offloading."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from jaxtyping import Float
from megatron_parallel import Axis
from megatron_parallel.recompute import (
    OffloadSavedTensors,
    ShardSavedTensors,
    activation_checkpoint,
)
from torch import Tensor, nn

from megatron_models.components.block import Block, add
from megatron_models.components.context import Context


def run_layers(
    layers: nn.ModuleDict, x: Float[Tensor, "s b h"], context: Context, tp: Axis
) -> Float[Tensor, "s b h"]:
    """Returns the residual stream after all layers of a stage.

    Under full recomputation a group of layers saves only its input, which ``tp`` cuts if the
    configuration asks for it. The saved activations of the first layers may be offloaded to host
    memory.
    """
    plan = context.recompute
    if plan.granularity != "full" and not plan.cpu_offloading_num_layers:
        return _run(list(layers.values()), context, x)
    parts = ShardSavedTensors(tp) if plan.distribute_saved_activations else None
    away = plan.cpu_offloading_num_layers
    host = OffloadSavedTensors(except_for=context.shared_tensors()) if away else None
    done = 0
    for group in plan.groups([int(number) for number in layers]):
        run = partial(_run, [layers[str(number)] for number in group.layers], context)
        with host.enabled() if host is not None and done < away else nullcontext():
            x = activation_checkpoint(run, x, hooks=parts) if group.checkpointed else run(x)
        done += len(group.layers)
    return x


def _run(layers: Sequence[nn.Module], context: Context, x: Tensor) -> Tensor:
    if not all(isinstance(layer, Block) and layer.adds_with_norm for layer in layers):
        for layer in layers:
            x = layer(x, context)
        return x
    added: Tensor | None = None
    for layer in layers:  # each adds what the one before it has left
        x, added = layer(x, context, added, defers=True)
    return add((x, added))
