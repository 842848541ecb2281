"""GLM-4: norms around each sublayer, and half of each head rotated in neighbouring pairs.

GLM team, 2024. One matrix holds gate and up projection. Queries, keys and values may have biases;
no other projection has.
"""

from megatron_models.families.family import Family, Row
from megatron_models.families.settings import Constant, Mapped, Translated
from megatron_models.models.gpt.families import llama, phi3
from megatron_models.models.gpt.families.rope import rope

_BLOCK = "model.layers.{i}"
_QKV_BIAS = tuple(row for row in llama.FAMILY.rows if row[0] == "layers.{i}.attention.qkv.bias")
_MLP = tuple(row for row in phi3.FAMILY.rows if row[0][:15] == "layers.{i}.mlp.")
_NORMS: tuple[Row, ...] = (
    (
        "layers.{i}.attention_norm_after.weight",
        (f"{_BLOCK}.post_self_attn_layernorm.weight",),
        (),
    ),
    ("layers.{i}.mlp_norm_after.weight", (f"{_BLOCK}.post_mlp_layernorm.weight",), ()),
)

FAMILY = Family(
    name="glm4",
    kind="gpt",
    title="GLM-4",
    architectures=("Glm4ForCausalLM",),
    model_type="glm4",
    rows=(*llama.START_ROWS, *_NORMS, *_QKV_BIAS, *_MLP, *llama.HEAD_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=2),
        "kv_channels": Mapped("head_dim", absent=128),
        "max_position_embeddings": Mapped("max_position_embeddings", absent=131072),
        "rotary_interleaved": Constant(True),
        "norm_epsilon": Mapped("rms_norm_eps", absent=1.5625e-7),
        "norm_placement": Constant("sandwich"),
        "add_bias_linear": Constant(False),
        "add_qkv_bias": Translated("attention_bias", ((True, True), (False, False)), absent=True),
    },
    custom=(rope(10000.0, percent=0.5),),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
