"""Bytes of activations that one layer keeps for its backward pass, term by term.

The terms are those of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models", section 4), evaluated with the bytes that the operations in use keep: element
size, width of stored dropout masks, attention written out or fused, norm fused or not. With the
paper's own (`Keeping.paper()`: bfloat16, masks of one byte, attention written out) they add up to
its constants: `s b h (34 + 5 a s / h)` for a layer, `s b h (10 + 24/t + 5 a s / (h t))` with tensor
parallelism, that divided by `t` in all its terms with sequence parallelism, `34 s b h / t` with
selective and `2 s b h` with full recomputation.
"""

from collections.abc import Sequence

from megatron_models.components.parts import LayerPass, Terms
from megatron_models.models.model_config import ModelConfig


def layer_activations(config: ModelConfig, taken: LayerPass, *, layer: int = 0) -> Terms:
    """Returns what one layer keeps of one micro-batch on one rank, by the part that keeps it.

    What all layers share (tables, dropout keys) is left out. Full recomputation is a matter of
    several layers: see `stack_activations`. Where experts are on other ranks, what a rank keeps
    depends on the routing: this is the mean over ranks.

    Args:
        config: the model.
        taken: the micro-batch, how it is cut, and what operations keep.
        layer: its number; layers may differ.
    """
    return config.trunk().layer_activations(layer, taken)


def stack_activations(
    config: ModelConfig, taken: LayerPass, *, layers: Sequence[int] | None = None
) -> int:
    """Returns what the layers of one stage keep of one micro-batch, in bytes on the device.

    What waits in host memory is not counted.

    Args:
        config: the model.
        taken: the micro-batch, how it is cut, and what operations keep.
        layers: numbers of those of the stage; by default all.
    """
    plan, trunk = taken.recompute, config.trunk()
    numbers = list(trunk.layers) if layers is None else layers
    whole = taken.tokens * trunk.width * taken.keeping.element
    cut = taken.sequence_parallel or plan.distribute_saved_activations
    kept_input = -(-whole // taken.tp) if cut else whole

    def each(layer: int) -> int:
        return sum(trunk.layer_activations(layer, taken).values())

    total = done = 0
    for group in plan.groups(numbers):
        if done >= plan.cpu_offloading_num_layers:
            total += kept_input if group.again else sum(map(each, group.layers))
        done += len(group.layers)
    return total
