"""T5 and Flan-T5: biases by relative position, RMSNorm, no other biases (Raffel et al., 2020).

Version 1.0 has ReLU and one embedding for encoder, decoder and output, whose inputs are divided by
the square root of the width. Version 1.1 and Flan-T5 have gated GELU and an output matrix of their
own. Scores of attention are not scaled. Each side's first layer stores the biases of all its
layers.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from megatron_models.components.mlp.spec import GATES
from megatron_models.families.family import UNTIED, Family, Operation, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    Derived,
    HFConfig,
    Mapped,
    Unused,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig
from megatron_models.models.gpt.families.activations import PLAIN

_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_QKV: Operation = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
_HEADS: Operation = (
    "reshape",
    {
        "source": ("$query_size", "$hidden_size"),
        "shape": ("$num_attention_heads", "$kv_channels", "$hidden_size"),
    },
)
_KV: tuple[Operation, ...] = (
    ("interleave", {"dim": 0, "blocks": "$num_query_groups"}),
    (
        "reshape",
        {"source": (-1, "$hidden_size"), "shape": ("$num_query_groups", -1, "$hidden_size")},
    ),
)
_GATE_UP: Operation = ("stack", {"dim": 0})


def _side(name: str, feed_forward: int, count: str) -> tuple[Row, ...]:
    """Returns the rows of both sides' sublayers.

    Args:
        name: ``encoder`` or ``decoder``.
        feed_forward: Number of the feed-forward sublayer in their layers.
        count: Our field with the number of layers.
    """
    ours, theirs = f"{name}.layers.{{i}}", f"{name}.block.{{i}}.layer"
    attention, mlp = f"{theirs}.0.SelfAttention", f"{theirs}.{feed_forward}.DenseReluDense"
    layers: Where = {"count": count}
    gated: Where = {**layers, "if": "$gated"}
    plain: Where = {**layers, "unless": "$gated"}
    return (
        (
            f"{name}.relative_bias.weight",
            (f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
            (),
        ),
        (f"{ours}.attention_norm.weight", (f"{theirs}.0.layer_norm.weight",), (), layers),
        (
            f"{ours}.attention.qkv.weight",
            tuple(f"{attention}.{part}.weight" for part in "qkv"),
            (_QKV,),
            layers,
        ),
        (f"{ours}.attention.out.weight", (f"{attention}.o.weight",), (), layers),
        (f"{ours}.mlp_norm.weight", (f"{theirs}.{feed_forward}.layer_norm.weight",), (), layers),
        (
            f"{ours}.mlp.up.weight",
            tuple(f"{mlp}.wi_{number}.weight" for number in (0, 1)),
            (_GATE_UP,),
            gated,
        ),
        (f"{ours}.mlp.up.weight", (f"{mlp}.wi.weight",), (), plain),
        (f"{ours}.mlp.down.weight", (f"{mlp}.wo.weight",), (), layers),
        (f"{name}.final_norm.weight", (f"{name}.final_layer_norm.weight",), ()),
    )


_CROSS, _OUR_CROSS = "decoder.block.{i}.layer.1", "decoder.layers.{i}.cross_attention"
_CROSSING: tuple[Row, ...] = (
    (f"{_OUR_CROSS}_norm.weight", (f"{_CROSS}.layer_norm.weight",), ()),
    (f"{_OUR_CROSS}.q.weight", (f"{_CROSS}.EncDecAttention.q.weight",), (_HEADS,)),
    (
        f"{_OUR_CROSS}.kv.weight",
        tuple(f"{_CROSS}.EncDecAttention.{part}.weight" for part in "kv"),
        _KV,
    ),
    (f"{_OUR_CROSS}.out.weight", (f"{_CROSS}.EncDecAttention.o.weight",), ()),
)

_THEIR_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {ours: theirs for theirs, ours in reversed(PLAIN)}
)
_OUR_NAMES: Final[Mapping[str, str]] = MappingProxyType(dict(PLAIN))
_GATED: Final[Mapping[str, str]] = MappingProxyType({gate: unit for unit, gate in GATES.items()})


def _activation_from_hf(title: str, hf_config: HFConfig) -> dict[str, str]:
    text = hf_config.get("feed_forward_proj", "relu")
    words = text.split("-") if isinstance(text, str) else []
    if not words or len(words) > 2 or (len(words) == 2 and words[0] != "gated"):
        raise unsupported_hf_field(title, "feed_forward_proj", text, ["relu", "gated-gelu"])
    # "gated-gelu" means the approximation. Files repeat both halves, which then hold.
    name = "gelu_new" if text == "gated-gelu" else words[-1]
    name, gated = (
        hf_config.get("dense_act_fn", name),
        hf_config.get("is_gated_act", len(words) == 2),
    )
    if not isinstance(gated, bool):
        raise unsupported_hf_field(title, "is_gated_act", gated, [False, True])
    names = {hf for hf, own in PLAIN if not gated or own in _GATED}
    if not isinstance(name, str) or name not in names:
        field = "dense_act_fn" if "dense_act_fn" in hf_config else "feed_forward_proj"
        raise unsupported_hf_field(title, field, name, sorted(names))
    own = _OUR_NAMES[name]
    return {"activation": _GATED[own] if gated else own}


def _activation_to_hf(config: EncoderDecoderConfig) -> dict[str, object]:
    own = GATES.get(config.activation, config.activation)
    name = _THEIR_NAMES[own]
    short = "gelu" if config.gated and own == "gelu_tanh" else name
    return {
        "feed_forward_proj": f"gated-{short}" if config.gated else name,
        "dense_act_fn": name,
        "is_gated_act": config.gated,
    }


def _tying_from_hf(title: str, hf_config: HFConfig) -> dict[str, object]:
    tied = hf_config.get("tie_word_embeddings", True)
    scaled = hf_config.get("scale_decoder_outputs", tied is not False)
    for name, value in (("tie_word_embeddings", tied), ("scale_decoder_outputs", scaled)):
        if value not in (None, False, True):
            raise unsupported_hf_field(title, name, value, [False, True])
    width = hf_config.get("d_model", 512)
    root = math.sqrt(width) if type(width) is int and width > 0 else 1.0
    return {
        "untie_embeddings_and_output_weights": tied is False,
        "logits_scaling": root if scaled else 1.0,
    }


def _tying_to_hf(config: EncoderDecoderConfig) -> dict[str, bool]:
    root, found = math.sqrt(config.hidden_size), config.logits_scaling
    tied = not config.untie_embeddings_and_output_weights
    if found != 1.0 and not math.isclose(found, root):
        raise unsupported_field("logits_scaling", f"1.0 or {root}", found)
    if tied:
        return {"tie_word_embeddings": True, "scale_decoder_outputs": found != 1.0}
    if found != 1.0:
        raise unsupported_field("logits_scaling", "1.0 with an output matrix of its own", found)
    return {"tie_word_embeddings": False}


def _depth_from_hf(title: str, hf_config: HFConfig) -> dict[str, object]:
    encoder, decoder = hf_config.get("num_layers", 6), hf_config.get("num_decoder_layers")
    return {
        "encoder_num_layers": encoder,
        "num_layers": encoder if decoder is None else decoder,
    }


def _depth_to_hf(config: EncoderDecoderConfig) -> dict[str, int]:
    return {"num_layers": config.encoder_num_layers, "num_decoder_layers": config.num_layers}


FAMILY = Family(
    name="t5",
    kind="t5",
    title="T5",
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    model_type="t5",
    rows=(
        ("embedding.word.weight", ("shared.weight",), (_VOCAB,)),
        *_side("encoder", 1, "$encoder_num_layers"),
        *_side("decoder", 2, "$num_layers"),
        *_CROSSING,
        ("output.weight", ("lm_head.weight",), (_VOCAB,), UNTIED),
    ),
    settings={
        "hidden_size": Mapped("d_model", absent=512),
        "num_attention_heads": Mapped("num_heads", absent=8),
        "num_query_groups": Derived(),
        "kv_channels": Mapped("d_kv", absent=64),
        "ffn_hidden_size": Mapped("d_ff", absent=2048),
        "vocab_size": Mapped("vocab_size", absent=32128),
        # Their code has no maximum. Older files have the length of pretraining.
        "max_position_embeddings": Mapped("n_positions", absent=512, null=512),
        "position_embedding_type": Constant("relative"),
        "relative_attention_num_buckets": Mapped("relative_attention_num_buckets", absent=32),
        "relative_attention_max_distance": Mapped("relative_attention_max_distance", absent=128),
        "normalization": Constant("RMSNorm"),
        "norm_epsilon": Mapped("layer_norm_epsilon", absent=1e-6),
        "softmax_scale": Constant(1.0),
        "add_bias_linear": Constant(False),
        "init_method_std": Unused(),  # theirs depends on the weight
    },
    custom=(
        Custom(
            fields=("encoder_num_layers", "num_layers"),
            hf_fields=("num_layers", "num_decoder_layers"),
            read=_depth_from_hf,
            write=_depth_to_hf,
        ),
        Custom(
            fields=("activation",),
            hf_fields=("feed_forward_proj", "dense_act_fn", "is_gated_act"),
            read=_activation_from_hf,
            write=_activation_to_hf,
        ),
        Custom(
            fields=("untie_embeddings_and_output_weights", "logits_scaling"),
            hf_fields=("tie_word_embeddings", "scale_decoder_outputs", "d_model"),
            read=_tying_from_hf,
            write=_tying_to_hf,
        ),
    ),
    neutral={"is_encoder_decoder": (True,)},
    without_effect=frozenset({"dropout_rate", "initializer_factor", "output_past"}),
    exported_constants={"is_encoder_decoder": True, "dropout_rate": 0.0},
    ignored=(
        *(
            (name, "same_as", {"other": "shared.weight", "rows": "$vocab_size"})
            for name in (
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
                "lm_head.weight",
            )
        ),
    ),
)
