"""Names and shapes of a model's parameters, from the configuration alone.

Shapes are global and unpadded, as checkpoints store them. Sizes and conversions can be planned
without building a model or importing torch. Each component's description defines its parameters
(`megatron_models.components.mixer`).
"""

from math import prod

from megatron_models.models.model_config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns the stored shape of each parameter by global name, in the order of the model."""
    return {name: spec.sharding.shape for name, spec in config.parameters().items()}


def stored_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns the shapes of all tensors of a model in a checkpoint: parameters, then state."""
    state = {name: sharding.shape for name, sharding in config.state().items()}
    return {**parameter_shapes(config), **state}


def parameter_count(config: ModelConfig, *, padded: bool = False, active: bool = False) -> int:
    """Returns the number of parameters; tied embeddings count once.

    Args:
        config: The model's configuration.
        padded: Count the padding rows of the vocabulary too, which exist in memory only.
        active: Count only the experts that one token uses.
    """
    count = 0
    for spec in config.parameters().values():
        count += spec.active_numel if active else spec.numel
        cut = spec.sharding
        if padded and cut.padded is not None and cut.dim is not None:
            row = prod(cut.shape) // cut.shape[cut.dim]
            count += (cut.padded - cut.shape[cut.dim]) * row
    return count
