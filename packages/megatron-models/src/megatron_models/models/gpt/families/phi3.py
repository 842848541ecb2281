"""Phi-3 and Phi-4: Llama with one matrix for queries, keys and values, and one for gate and up.

Abdin et al., 2024. Transformers has its code, so the code that is distributed with the files, which
``auto_map`` names, is not needed.
"""

from megatron_models.families.family import UNTIED, Family, Operation, Row
from megatron_models.families.settings import Constant, Mapped
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import windows

_QKV: Operation = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
_GATE_UP: Operation = (
    "reshape",
    {"shape": [2, "$ffn_hidden_size", "$hidden_size"], "source": [-1, "$hidden_size"]},
)
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_BLOCK = "model.layers.{i}"
_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("model.embed_tokens.weight",), (_VOCAB,)),
    ("layers.{i}.attention_norm.weight", (f"{_BLOCK}.input_layernorm.weight",), ()),
    ("layers.{i}.mlp_norm.weight", (f"{_BLOCK}.post_attention_layernorm.weight",), ()),
    ("layers.{i}.attention.qkv.weight", (f"{_BLOCK}.self_attn.qkv_proj.weight",), (_QKV,)),
    ("layers.{i}.attention.out.weight", (f"{_BLOCK}.self_attn.o_proj.weight",), ()),
    ("layers.{i}.mlp.up.weight", (f"{_BLOCK}.mlp.gate_up_proj.weight",), (_GATE_UP,)),
    ("layers.{i}.mlp.down.weight", (f"{_BLOCK}.mlp.down_proj.weight",), ()),
    ("final_norm.weight", ("model.norm.weight",), ()),
    ("output.weight", ("lm_head.weight",), (_VOCAB,), UNTIED),
)

FAMILY = Family(
    name="phi3",
    kind="gpt",
    title="Phi-3",
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    rows=_ROWS,
    settings={
        **llama.FAMILY.settings,
        "norm_epsilon": Mapped("rms_norm_eps", absent=1e-5),
        "add_bias_linear": Constant(False),
    },
    custom=(
        rope(
            10000.0,
            kinds=("longrope",),
            percent=1.0,
            aliases={"su": "longrope", "yarn": "longrope"},  # of older files
            original=4096,
        ),
        windows(listed=False),
    ),
    neutral={
        "attention_bias": (False,),
        # Of Phi-4-mini; its values switch off what only the published code has.
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
        "lm_head_bias": (False,),
        "mlp_bias": (False,),
    },
    published_code={
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    without_effect=frozenset({"resid_pdrop", "embd_pdrop"}),
    exported_constants={"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
    defers_to=("llama",),
)
