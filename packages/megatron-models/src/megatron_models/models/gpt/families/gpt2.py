"""GPT-2: learned positions, LayerNorm, tanh GELU, biases, tied output (Radford et al., 2019).

Linear layers are stored transposed ("Conv1D"), and one matrix holds the queries of all heads, then
the keys, then the values.
"""

from dataclasses import fields

from megatron_models.components.embedding.spec import PositionConfig
from megatron_models.components.rotary.config import RotaryConfig
from megatron_models.families.family import UNTIED, Family, Operation, Row
from megatron_models.families.settings import Constant, Derived, Mapped, Translated, Unused
from megatron_models.models.gpt.families.activations import activation

_TRANSPOSE: Operation = ("transpose", {})
_QKV: Operation = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})


def _same(name: str, hf_name: str) -> tuple[Row, ...]:
    return tuple((f"{name}.{part}", (f"{hf_name}.{part}",), ()) for part in ("weight", "bias"))


def _linear(name: str, hf_name: str) -> tuple[Row, ...]:
    return (
        (f"{name}.weight", (f"{hf_name}.weight",), (_TRANSPOSE,)),
        (f"{name}.bias", (f"{hf_name}.bias",), ()),
    )


_BLOCK = "transformer.h.{i}"
_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("transformer.wte.weight",), (_VOCAB,)),
    ("embedding.position.weight", ("transformer.wpe.weight",), ()),
    *_same("layers.{i}.attention_norm", f"{_BLOCK}.ln_1"),
    ("layers.{i}.attention.qkv.weight", (f"{_BLOCK}.attn.c_attn.weight",), (_TRANSPOSE, _QKV)),
    ("layers.{i}.attention.qkv.bias", (f"{_BLOCK}.attn.c_attn.bias",), (_QKV,)),
    *_linear("layers.{i}.attention.out", f"{_BLOCK}.attn.c_proj"),
    *_same("layers.{i}.mlp_norm", f"{_BLOCK}.ln_2"),
    *_linear("layers.{i}.mlp.up", f"{_BLOCK}.mlp.c_fc"),
    *_linear("layers.{i}.mlp.down", f"{_BLOCK}.mlp.c_proj"),
    *_same("final_norm", "transformer.ln_f"),
    ("output.weight", ("lm_head.weight",), (_VOCAB,), UNTIED),
)

ROTARY = tuple(
    each.name
    for each in fields(RotaryConfig)
    if each.name not in {inherited.name for inherited in fields(PositionConfig)}
)
"""Fields that learned positions do not read."""

FAMILY = Family(
    name="gpt2",
    kind="gpt",
    title="GPT-2",
    architectures=("GPT2LMHeadModel",),
    model_type="gpt2",
    rows=_ROWS,
    settings={
        "num_layers": Mapped("n_layer"),
        "hidden_size": Mapped("n_embd"),
        "num_attention_heads": Mapped("n_head"),
        "num_query_groups": Derived(),
        "kv_channels": Derived(),
        "ffn_hidden_size": Mapped("n_inner", absent=0, null=0),
        "vocab_size": Mapped("vocab_size"),
        "max_position_embeddings": Mapped("n_positions"),
        "position_embedding_type": Constant("learned_absolute"),
        **dict.fromkeys(ROTARY, Unused()),
        "normalization": Constant("LayerNorm"),
        "norm_epsilon": Mapped("layer_norm_epsilon", absent=1e-5),
        "activation": activation("activation_function", absent="gelu_new"),
        "add_bias_linear": Constant(True),
        "untie_embeddings_and_output_weights": Translated(
            "tie_word_embeddings", ((True, False), (False, True)), absent=True
        ),
        "init_method_std": Mapped("initializer_range", absent=0.02),
    },
    neutral={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "position_embedding_type": ("absolute",),
        "rope_scaling": ({},),
        "rope_parameters": ({},),
        "multi_query": (False,),
    },
    # The first affects only the rounding of scores; the others belong to training, or to a head
    # that is not read.
    without_effect=frozenset(
        {
            "reorder_and_upcast_attn",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "n_ctx",
            "predict_special_tokens",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        }
    ),
    exported_constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ignored=(
        ("lm_head.weight", "same_as", {"other": "transformer.wte.weight", "rows": "$vocab_size"}),
        (f"{_BLOCK}.attn.bias", "causal_mask", {}),
        # It is -1e4, which bfloat16 rounds to -9984.
        (f"{_BLOCK}.attn.masked_bias", "at_most", {"value": -9e3}),
    ),
    prefix="transformer.",
)
