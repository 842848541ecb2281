"""Names and shapes of a model's parameters, from the configuration alone.

Shapes are global and unpadded, as checkpoints store them, so sizes and conversions can be planned
without building a model or importing torch.
"""

import math
from collections.abc import Iterator

from megatron_models.config import GPTConfig

Shape = tuple[int, ...]


def parameter_shapes(config: GPTConfig) -> dict[str, Shape]:
    """Return the stored shape of every parameter by its global name, in the order of the model."""
    return dict(_shapes(config))


def parameter_count(config: GPTConfig, *, padded: bool = False) -> int:
    """Return the number of parameters; tied embeddings count once.

    Args:
        config: the model.
        padded: count the padded rows of the vocabulary too, which exist in memory only.
    """
    count = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    if padded:
        matrices = 2 if config.untie_embeddings_and_output_weights else 1
        rows = config.padded_vocab_size - config.vocab_size
        count += matrices * rows * config.hidden_size
    return count


def _shapes(config: GPTConfig) -> Iterator[tuple[str, Shape]]:
    vocab = (config.vocab_size, config.hidden_size)
    yield "embedding.word.weight", vocab
    if config.position_embedding_type == "learned_absolute":
        yield "embedding.position.weight", (config.max_position_embeddings, config.hidden_size)
    for index in range(config.num_layers):
        for name, shape in _block_shapes(config):
            yield f"layers.{index}.{name}", shape
    yield from _norm("final_norm", config)
    if config.untie_embeddings_and_output_weights:
        yield "output.weight", vocab


def _block_shapes(config: GPTConfig) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    qkv = (config.num_query_groups, (config.heads_per_group + 2) * config.kv_channels)
    up = (2, ffn) if config.gated else (ffn,)
    bias = config.add_bias_linear
    yield from _norm("attention_norm", config)
    yield from _linear("attention.qkv", qkv, hidden, config.has_qkv_bias)
    yield from _linear("attention.out", (hidden,), config.query_size, bias)
    yield from _norm("mlp_norm", config)
    yield from _linear("mlp.up", up, hidden, bias)
    yield from _linear("mlp.down", (hidden,), ffn, bias)


def _linear(name: str, rows: Shape, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (*rows, columns)
    if bias:
        yield f"{name}.bias", rows


def _norm(name: str, config: GPTConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.normalization == "LayerNorm":
        yield f"{name}.bias", (config.hidden_size,)
