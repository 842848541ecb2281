"""Bytes of activations that one layer keeps for its backward pass, term by term.

The terms are those of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models", section 4), evaluated with the bytes that the operations in use keep: element
size, width of stored dropout masks, attention written out or fused, norm fused or not. With the
paper's own (`SavedBytes.paper()`: bfloat16, masks of one byte, unfused attention) they add up to
its constants: `s b h (34 + 5 a s / h)` for a layer, `s b h (10 + 24/t + 5 a s / (h t))` with tensor
parallelism, that divided by `t` in all its terms with sequence parallelism, `34 s b h / t` with
selective and `2 s b h` with full recomputation.
"""

from collections.abc import Sequence

from megatron_models.components.mixer import BytesByPart, LayerPass
from megatron_models.models.model_config import ModelConfig


def layer_activations(config: ModelConfig, layer_pass: LayerPass, *, layer: int = 0) -> BytesByPart:
    """Returns what one layer keeps of one micro-batch on one rank, by the part that keeps it.

    What all layers share (tables, dropout keys) is left out. Full recomputation is a matter of
    several layers: see `stack_activations`. Where experts are on other ranks, what a rank keeps
    depends on the routing: this is the mean over ranks.

    Args:
        config: the model.
        layer_pass: the micro-batch, how it is cut, and what operations keep.
        layer: its number; layers may differ.
    """
    return config.trunk().layer_activations(layer, layer_pass)


def stack_activations(
    config: ModelConfig, layer_pass: LayerPass, *, layers: Sequence[int] | None = None
) -> int:
    """Returns what the layers of one stage keep of one micro-batch, in bytes on the device.

    What waits in host memory is not counted.

    Args:
        config: the model.
        layer_pass: the micro-batch, how it is cut, and what operations keep.
        layers: numbers of those of the stage; by default all.
    """
    plan, trunk = layer_pass.recompute, config.trunk()
    numbers = list(trunk.layers) if layers is None else layers
    whole = layer_pass.tokens * trunk.width * layer_pass.saved_bytes.activation
    cut = layer_pass.sequence_parallel or plan.distribute_saved_activations
    kept_input = -(-whole // layer_pass.tp) if cut else whole

    def each(layer: int) -> int:
        return sum(trunk.layer_activations(layer, layer_pass).values())

    total = done = 0
    for group in plan.groups(numbers):
        if done >= plan.cpu_offloading_num_layers:
            total += kept_input if group.checkpointed else sum(map(each, group.layers))
        done += len(group.layers)
    return total
