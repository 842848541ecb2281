"""GPT-NeoX and Pythia: parallel attention and feed-forward layer, partly rotated heads.

Black et al., 2022; Biderman et al., 2023. The rows of ``query_key_value`` are grouped by head, as
here.
"""

from typing import Any, Final

from megatron_models.families.family import UNTIED, Family, Operation, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    Derived,
    HFConfig,
    Mapped,
    Translated,
    unsupported_hf_field,
)
from megatron_models.models.gpt.families.activations import activation
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.rope import rope

#: Of a matrix and of a vector whose rows are grouped by key and value.
QKV_WEIGHT: Operation = (
    "reshape",
    {"shape": ["$num_query_groups", -1, "$hidden_size"], "source": [-1, "$hidden_size"]},
)
QKV_BIAS: Operation = ("reshape", {"shape": ["$num_query_groups", -1], "source": [-1]})
VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_BLOCK = "gpt_neox.layers.{i}"


def with_bias(name: str, hf_name: str, where: Where | None = None) -> tuple[Row, Row]:
    """Returns the rows of weight and bias of a layer that has both."""
    weight, bias = (
        (f"{name}.{part}", (f"{hf_name}.{part}",), (), where or {}) for part in ("weight", "bias")
    )
    return weight, bias


_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("gpt_neox.embed_in.weight",), (VOCAB,)),
    *with_bias("layers.{i}.attention_norm", f"{_BLOCK}.input_layernorm"),
    (
        "layers.{i}.attention.qkv.weight",
        (f"{_BLOCK}.attention.query_key_value.weight",),
        (QKV_WEIGHT,),
    ),
    (
        "layers.{i}.attention.qkv.bias",
        (f"{_BLOCK}.attention.query_key_value.bias",),
        (QKV_BIAS,),
        {"if": "$has_qkv_bias"},
    ),
    ("layers.{i}.attention.out.weight", (f"{_BLOCK}.attention.dense.weight",), ()),
    (
        "layers.{i}.attention.out.bias",
        (f"{_BLOCK}.attention.dense.bias",),
        (),
        {"if": "$has_attention_out_bias"},
    ),
    *with_bias("layers.{i}.mlp_norm", f"{_BLOCK}.post_attention_layernorm"),
    *with_bias("layers.{i}.mlp.up", f"{_BLOCK}.mlp.dense_h_to_4h"),
    *with_bias("layers.{i}.mlp.down", f"{_BLOCK}.mlp.dense_4h_to_h"),
    *with_bias("final_norm", "gpt_neox.final_layer_norm"),
    ("output.weight", ("embed_out.weight",), (VOCAB,), UNTIED),
)


def _copies_from_hf(title: str, hf_config: HFConfig) -> dict[str, Any]:
    """Checks the names of other families, which transformers 4 adds and no version reads."""
    settings = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
    settings = settings if isinstance(settings, dict) else {}
    for copy, name, absent in _COPIES:
        given, read = hf_config.get(copy), settings.get(copy, hf_config.get(name, absent))
        if given is not None and given != read:
            raise unsupported_hf_field(title, copy, given, [read])
    return {}


_COPIES: Final = (
    ("rope_theta", "rotary_emb_base", 10000.0),
    ("partial_rotary_factor", "rotary_pct", 0.25),
)

FAMILY = Family(
    name="gpt_neox",
    kind="gpt",
    title="GPT-NeoX",
    architectures=("GPTNeoXForCausalLM",),
    model_type="gpt_neox",
    rows=_ROWS,
    settings={
        "num_layers": Mapped("num_hidden_layers"),
        "hidden_size": Mapped("hidden_size"),
        "num_attention_heads": Mapped("num_attention_heads"),
        "num_query_groups": Derived(),
        "kv_channels": Derived(),
        "ffn_hidden_size": Mapped("intermediate_size"),
        "vocab_size": Mapped("vocab_size"),
        "max_position_embeddings": Mapped("max_position_embeddings"),
        "position_embedding_type": Constant("rope"),
        "normalization": Constant("LayerNorm"),
        "norm_epsilon": Mapped("layer_norm_eps", absent=1e-5),
        "parallel_residual": Translated(
            "use_parallel_residual", ((True, "two_norms"), (False, "none")), absent=True
        ),
        "activation": activation("hidden_act", absent="gelu"),
        "untie_embeddings_and_output_weights": Translated(
            "tie_word_embeddings", ((True, False), (False, True)), absent=False
        ),
        "init_method_std": Mapped("initializer_range", absent=0.02),
    },
    custom=(
        rope(10000.0, percent=0.25, base_name="rotary_emb_base", percent_name="rotary_pct"),
        attention_bias(absent=True, mlp=True),
        Custom((), tuple(copy for copy, *_ in _COPIES), _copies_from_hf, lambda _: {}),
    ),
    # Older names of dropout rates.
    without_effect=frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob"}),
    exported_constants={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    ignored=(
        (
            "embed_out.weight",
            "same_as",
            {"other": "gpt_neox.embed_in.weight", "rows": "$vocab_size"},
        ),
        (f"{_BLOCK}.attention.bias", "causal_mask", {}),
        (f"{_BLOCK}.attention.masked_bias", "at_most", {"value": -9e3}),
        (
            f"{_BLOCK}.attention.rotary_emb.inv_freq",
            "rotary_frequencies",
            {"base": "$rotary_base", "dim": "$rotary_dim"},
        ),
    ),
    prefix="gpt_neox.",
)
