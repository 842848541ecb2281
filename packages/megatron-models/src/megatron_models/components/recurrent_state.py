"""The state of recurrent layers in decoding, read from and written to a cache."""

from megatron_models.cache import State, StateCache
from megatron_models.components.context import Context
from megatron_models.errors import ConfigError


def read_state(context: Context, layer: int) -> State | None:
    """Returns the state of a layer before the new tokens, or None if it is zero.

    The state of a sequence whose first new token begins another document is zero.

    Args:
        context: State of the pass.
        layer: Number of the layer in the model.

    Raises:
        ConfigError: The cache does not store states.
    """
    if context.cache is None:
        return None
    state = _cache(context, layer).read_state(layer)
    kept = context.continues
    if state is None or kept is None:
        return state
    return {
        name: tensor * kept.view(-1, *[1] * (tensor.dim() - 1)) for name, tensor in state.items()
    }


def write_state(context: Context, layer: int, state: State, tokens: int) -> None:
    """Stores the state of a layer after the new tokens, if there is a cache.

    Args:
        context: State of the pass.
        layer: Number of the layer in the model.
        state: State of each sequence.
        tokens: Number of new tokens, including padding.
    """
    if context.cache is not None:
        _cache(context, layer).write_state(layer, state, tokens)


def _cache(context: Context, layer: int) -> StateCache:
    if isinstance(context.cache, StateCache):
        return context.cache
    raise ConfigError(
        f"layer {layer} is recurrent and needs a cache that stores its state (StateCache), such as "
        f"StaticKVCache, not {type(context.cache).__name__}"
    )
