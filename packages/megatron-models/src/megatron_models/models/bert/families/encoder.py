"""Rows and settings that BERT, RoBERTa and MiniLM share."""

from collections.abc import Mapping
from typing import Final

from megatron_models.families.family import Operation, Row
from megatron_models.families.settings import Constant, Derived, Mapped, Setting, Translated, Unused
from megatron_models.models.gpt.families.activations import activation
from megatron_models.models.gpt.families.gpt2 import ROTARY

VOCAB: Final[Operation] = ("slice_rows", {"rows": "$vocab_size"})
_QKV: Final[Operation] = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
PARTS: Final = ("weight", "bias")
FORMER_ENDINGS: Final = {
    ".LayerNorm.gamma": ".LayerNorm.weight",
    ".LayerNorm.beta": ".LayerNorm.bias",
}
"""The released files of BERT name the parameters of norms as its first program did."""


def same(ours: str, theirs: str, condition: str = "") -> tuple[Row, ...]:
    """Returns the rows of weight and bias that both sides store alike.

    Args:
        ours: Prefix of our names.
        theirs: Prefix of their names.
        condition: Property of the configuration without which a model does not have them.
    """
    where = {"if": f"${condition}"} if condition else {}
    return tuple((f"{ours}.{part}", (f"{theirs}.{part}",), (), where) for part in PARTS)


def _qkv(part: str, layer: str) -> Row:
    theirs = tuple(f"{layer}.attention.self.{name}.{part}" for name in ("query", "key", "value"))
    return (f"layers.{{i}}.attention.qkv.{part}", theirs, (_QKV,))


def trunk_rows(prefix: str) -> tuple[Row, ...]:
    """Returns the rows of embeddings and layers, whose names in the file have this prefix."""
    layer, embeddings = f"{prefix}encoder.layer.{{i}}", f"{prefix}embeddings"
    return (
        ("embedding.word.weight", (f"{embeddings}.word_embeddings.weight",), (VOCAB,)),
        ("embedding.position.weight", (f"{embeddings}.position_embeddings.weight",), ()),
        ("embedding.token_types.weight", (f"{embeddings}.token_type_embeddings.weight",), ()),
        *same("embedding.norm", f"{embeddings}.LayerNorm"),
        *(_qkv(part, layer) for part in PARTS),
        *same("layers.{i}.attention.out", f"{layer}.attention.output.dense"),
        *same("layers.{i}.attention_norm_sum", f"{layer}.attention.output.LayerNorm"),
        *same("layers.{i}.mlp.up", f"{layer}.intermediate.dense"),
        *same("layers.{i}.mlp.down", f"{layer}.output.dense"),
        *same("layers.{i}.mlp_norm_sum", f"{layer}.output.LayerNorm"),
    )


TRUNK_SETTINGS: Final[Mapping[str, Setting]] = {
    "num_layers": Mapped("num_hidden_layers", absent=12),
    "hidden_size": Mapped("hidden_size", absent=768),
    "num_attention_heads": Mapped("num_attention_heads", absent=12),
    "num_query_groups": Derived(),
    "kv_channels": Derived(),
    "ffn_hidden_size": Mapped("intermediate_size", absent=3072),
    "max_position_embeddings": Mapped("max_position_embeddings", absent=512),
    "position_embedding_type": Constant("learned_absolute"),
    **dict.fromkeys(ROTARY, Unused()),
    "normalization": Constant("LayerNorm"),
    "norm_placement": Constant("sum"),
    "norm_epsilon": Mapped("layer_norm_eps", absent=1e-12),
    "embedding_norm": Constant(True),
    "activation": activation("hidden_act", absent="gelu"),
    "num_tokentypes": Mapped("type_vocab_size", absent=2),
    "add_bias_linear": Constant(True),
    "init_method_std": Mapped("initializer_range", absent=0.02),
}
"""Settings of embeddings and layers. `ROTARY` are fields that learned positions do not read."""

GELU: Final = Translated("hidden_act", (("gelu", "gelu"),), absent="gelu")

NEUTRAL: Final = {
    "position_embedding_type": ("absolute",),
    "tie_word_embeddings": (True,),
    "is_decoder": (False,),
}
WITHOUT_EFFECT: Final = frozenset(
    {
        *("attention_probs_dropout_prob", "hidden_dropout_prob"),
        # Of the first program: files of Chinese and multilingual models have them.
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads"),
        *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    }
)
EXPORTED: Final = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
