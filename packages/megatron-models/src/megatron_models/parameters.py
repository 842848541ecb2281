"""Names and shapes of a model's parameters, from the configuration alone.

Shapes are global and unpadded, as checkpoints store them, so sizes and conversions can be planned
without building a model or importing torch. Every component says what it has
(`megatron_models.components.mixer`).
"""

from math import prod

from megatron_models.models.model_config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns the stored shape of every parameter by its global name, in the order of the model."""
    return {name: spec.sharding.shape for name, spec in config.parameters().items()}


def stored_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the stored shape of all that a checkpoint holds of a model: parameters, then state."""
    state = {name: sharding.shape for name, sharding in config.state().items()}
    return {**parameter_shapes(config), **state}


def parameter_count(config: ModelConfig, *, padded: bool = False, active: bool = False) -> int:
    """Returns the number of parameters; tied embeddings count once.

    Args:
        config: the model.
        padded: count the padded rows of the vocabulary too, which exist in memory only.
        active: count only the experts that one token goes to.
    """
    count = 0
    for spec in config.parameters().values():
        count += spec.active_numel if active else spec.numel
        cut = spec.sharding
        if padded and cut.padded is not None and cut.dim is not None:
            row = prod(cut.shape) // cut.shape[cut.dim]
            count += (cut.padded - cut.shape[cut.dim]) * row
    return count
