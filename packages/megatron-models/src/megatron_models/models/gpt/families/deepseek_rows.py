"""Rows of DeepSeek-V2 and V3: attention, experts, and layers of multi-token prediction."""

from megatron_models.families.family import UNTIED, Operation, Row, Where

_ATTENTION = "model.layers.{i}.self_attn"
_MLP = "model.layers.{i}.mlp"
_EXPERT = f"{_MLP}.experts.{{e}}"
_STACK: Operation = ("stack", {"dim": 0})
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_LATENT: Where = {"if": "$has_query_latent"}
_EXPERTS: Where = {"if": "$moe_layers"}
_DENSE: Where = {"unless": "$moe_layers"}
_QUERIES: Operation = (
    "reshape",
    {"shape": ["$num_attention_heads", "$kv_channels", -1], "source": ["$query_size", -1]},
)
_KEYS_VALUES: Operation = (
    "reshape",
    {"shape": ["$num_attention_heads", -1, "$kv_lora_rank"], "source": [-1, "$kv_lora_rank"]},
)

_ATTENTION_ROWS: tuple[Row, ...] = (
    *(
        (f"layers.{{i}}.attention.{ours}", (f"{_ATTENTION}.{theirs}",), ops, where)
        for ours, theirs, ops, where in (
            (
                "q.weight",
                "q_proj.weight",
                (_QUERIES,),
                {"unless": "$has_query_latent"},
            ),
            ("q_down.weight", "q_a_proj.weight", (), _LATENT),
            ("q_down.bias", "q_a_proj.bias", (), {"if": "$has_query_latent_bias"}),
            ("q_norm.weight", "q_a_layernorm.weight", (), _LATENT),
            ("q_up.weight", "q_b_proj.weight", (_QUERIES,), _LATENT),
            ("kv_down.bias", "kv_a_proj_with_mqa.bias", (), {"if": "$add_qkv_bias"}),
            ("out.bias", "o_proj.bias", (), {"if": "$has_attention_out_bias"}),
        )
    ),
    *(
        (f"layers.{{i}}.attention.{ours}", (f"{_ATTENTION}.{theirs}",), ops)
        for ours, theirs, ops in (
            ("kv_down.weight", "kv_a_proj_with_mqa.weight", ()),
            ("kv_norm.weight", "kv_a_layernorm.weight", ()),
            ("kv_up.weight", "kv_b_proj.weight", (_KEYS_VALUES,)),
            ("out.weight", "o_proj.weight", ()),
        )
    ),
)


def _feed_forward(ours: str, theirs: str, where: Where) -> tuple[Row, Row]:
    gate_up = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
    return (
        (f"layers.{{i}}.{ours}.up.weight", gate_up, (_STACK,), where),
        (f"layers.{{i}}.{ours}.down.weight", (f"{theirs}.down_proj.weight",), (), where),
    )


#: All rows of DeepSeek-V2, and of V3 but for the biases of experts.
ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("model.embed_tokens.weight",), (_VOCAB,)),
    ("layers.{i}.attention_norm.weight", ("model.layers.{i}.input_layernorm.weight",), ()),
    ("layers.{i}.mlp_norm.weight", ("model.layers.{i}.post_attention_layernorm.weight",), ()),
    *_ATTENTION_ROWS,
    *_feed_forward("mlp", _MLP, _DENSE),
    *_feed_forward("mlp.shared", f"{_MLP}.shared_experts", _EXPERTS),
    ("layers.{i}.mlp.router.weight", (f"{_MLP}.gate.weight",), (), _EXPERTS),
    (
        "layers.{i}.mlp.experts.up.weight",
        (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
        (
            _STACK,
            (
                "reshape",
                {
                    "shape": ["$num_experts", 2, "$moe_ffn_hidden_size", "$hidden_size"],
                    "source": [-1, "$moe_ffn_hidden_size", "$hidden_size"],
                },
            ),
        ),
        _EXPERTS,
    ),
    (
        "layers.{i}.mlp.experts.down.weight",
        (f"{_EXPERT}.down_proj.weight",),
        (_STACK,),
        _EXPERTS,
    ),
    ("final_norm.weight", ("model.norm.weight",), ()),
    ("output.weight", ("lm_head.weight",), (_VOCAB,), UNTIED),
)


def _of_depth(row: Row) -> Row:
    """Returns the row of multi-token prediction for that of a layer with experts."""
    ours, theirs, operations, *rest = row
    where = rest[0] if rest else {}
    return (
        "".join(ours).replace("layers.{i}.", "mtp.{m}.layer."),
        tuple(name.replace("{i}", "{m}") for name in theirs),
        operations,
        {} if where == _EXPERTS else where,
    )


#: Biases that select experts, of DeepSeek-V3.
BIASES: Row = (
    "layers.{i}.mlp.router.expert_bias",
    (f"{_MLP}.gate.e_score_correction_bias",),
    (),
    _EXPERTS,
)
_EMBEDDING, _HEAD = (
    "model.layers.{m}.embed_tokens.weight",
    "model.layers.{m}.shared_head.head.weight",
)
_TIED: Operation = ("tie", {})

#: Embedding and output matrix with their copies in the layers of multi-token prediction.
SHARED_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("model.embed_tokens.weight", _EMBEDDING), (_TIED, _VOCAB), UNTIED),
    (
        "embedding.word.weight",
        ("model.embed_tokens.weight", _EMBEDDING, _HEAD),
        (_TIED, _VOCAB),
        {"unless": "$untie_embeddings_and_output_weights"},
    ),
    ("output.weight", ("lm_head.weight", _HEAD), (_TIED, _VOCAB), UNTIED),
)
#: Layers of multi-token prediction.
DEPTH_ROWS: tuple[Row, ...] = (
    *(
        (f"mtp.{{m}}.{ours}.weight", (f"model.layers.{{m}}.{theirs}.weight",), ())
        for ours, theirs in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_norm", "shared_head.norm"),
        )
    ),
    *(_of_depth(row) for row in (*ROWS, BIASES) if "{i}" in row[0] and row[3:] != (_DENSE,)),
)
