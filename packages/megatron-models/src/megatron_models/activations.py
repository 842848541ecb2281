"""Bytes of activations that one layer saves for its backward pass, by submodule.

The formulas are those of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models", section 4), evaluated with the bytes that the operations in use save: element
size, width of stored dropout masks, fused or unfused attention, fused or unfused norms. With the
paper's assumptions (`SavedBytes.paper()`: bfloat16, masks of one byte, unfused attention) the sums
are those of the paper: `s b h (34 + 5 a s / h)` for a layer, `s b h (10 + 24/t + 5 a s / (h t))`
with tensor parallelism, the former divided by `t` with sequence parallelism, `34 s b h / t` with
selective and `2 s b h` with full recomputation.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_models.components.mixer import BytesByPart, LayerPass
from megatron_models.models.model_config import ModelConfig


def layer_activations(config: ModelConfig, layer_pass: LayerPass, *, layer: int = 0) -> BytesByPart:
    """Returns the bytes that one layer saves for one micro-batch on one rank, by submodule.

    Tensors that all layers share (rotary tables, dropout keys) are left out. Full recomputation
    covers several layers; see `stack_activations`. With expert parallelism the bytes of a rank
    depend on the routing; the result is the mean over ranks.

    Args:
        config: The model's configuration.
        layer_pass: The micro-batch, how it is cut, and the bytes that operations save.
        layer: Number of the layer; layers may differ.
    """
    return config.trunk().layer_activations(layer, layer_pass)


def stack_activations(
    config: ModelConfig,
    layer_pass: LayerPass,
    *,
    layers: Sequence[int] | None = None,
    plain_layers: Collection[int] = (),
) -> int:
    """Returns the bytes that the layers of one stage save for one micro-batch on the device.

    Activations that are offloaded to host memory are not counted.

    Args:
        config: The model's configuration.
        layer_pass: The micro-batch, how it is cut, and the bytes that operations save.
        layers: Numbers of the stage's layers. Defaults to all.
        plain_layers: Numbers of layers whose linear layers save their inputs as they are.
    """
    plan, trunk = layer_pass.recompute, config.trunk()
    numbers = list(trunk.layers) if layers is None else layers
    whole = layer_pass.tokens * trunk.width * layer_pass.saved_bytes.activation
    cut = layer_pass.sequence_parallel or plan.distribute_saved_activations
    kept_input = -(-whole // layer_pass.tp) if cut else whole

    as_they_are = replace(
        layer_pass, saved_bytes=replace(layer_pass.saved_bytes, linear_input=None)
    )

    def each(layer: int) -> int:
        own = as_they_are if layer in plain_layers else layer_pass
        return sum(trunk.layer_activations(layer, own).values())

    total = done = 0
    for group in plan.groups(numbers):
        if done >= plan.cpu_offloading_num_layers:
            total += kept_input if group.checkpointed else sum(map(each, group.layers))
        done += len(group.layers)
    return total
