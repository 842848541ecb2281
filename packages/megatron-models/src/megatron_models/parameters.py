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


def parameter_count(config: GPTConfig, *, padded: bool = False, active: bool = False) -> int:
    """Return the number of parameters; tied embeddings count once.

    Args:
        config: the model.
        padded: count the padded rows of the vocabulary too, which exist in memory only.
        active: count only the experts that one token goes to.
    """
    count = 0
    for name, shape in parameter_shapes(config).items():
        chosen = active and ".experts." in name
        count += math.prod((config.moe_router_topk, *shape[1:]) if chosen else shape)
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
    for index, experts in enumerate(config.moe_layers):
        for name, shape in _block_shapes(config, experts):
            yield f"layers.{index}.{name}", shape
    yield from _norm("final_norm", config)
    if config.untie_embeddings_and_output_weights:
        yield "output.weight", vocab


def _block_shapes(config: GPTConfig, experts: bool) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    qkv = (config.num_query_groups, (config.heads_per_group + 2) * config.kv_channels)
    yield from _norm("attention_norm", config)
    yield from _linear("attention.qkv", qkv, hidden, config.has_qkv_bias)
    if config.softmax_type == "learnable":
        yield "attention.sinks.weight", (config.num_attention_heads,)
    yield from _linear("attention.out", (hidden,), config.query_size, config.has_attention_out_bias)
    yield from _norm("mlp_norm", config)
    if experts:
        yield from _expert_shapes(config)
    else:
        yield from _feed_forward("mlp", config, config.ffn_hidden_size)


def _expert_shapes(config: GPTConfig) -> Iterator[tuple[str, Shape]]:
    yield "mlp.router.weight", (config.num_experts, config.hidden_size)
    for name, shape in _feed_forward("mlp.experts", config, config.moe_ffn_hidden_size):
        yield name, (config.num_experts, *shape)
    if width := config.moe_shared_expert_intermediate_size:
        yield from _feed_forward("mlp.shared", config, width)


def _feed_forward(name: str, config: GPTConfig, width: int) -> Iterator[tuple[str, Shape]]:
    up = (2, width) if config.gated else (width,)
    yield from _linear(f"{name}.up", up, config.hidden_size, config.has_mlp_bias)
    yield from _linear(f"{name}.down", (config.hidden_size,), width, config.has_mlp_bias)


def _linear(name: str, rows: Shape, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (*rows, columns)
    if bias:
        yield f"{name}.bias", rows


def _norm(name: str, config: GPTConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.normalization == "LayerNorm":
        yield f"{name}.bias", (config.hidden_size,)
