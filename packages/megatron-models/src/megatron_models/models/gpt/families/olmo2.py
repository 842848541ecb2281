"""OLMo 2: norms of the outputs of sublayers, and of all queries and all keys together.

OLMo team, 2024. Otherwise Llama.
"""

from megatron_models.families.family import Family, Row
from megatron_models.families.settings import Constant, Mapped
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.rope import rope

_BLOCK = "model.layers.{i}"
_ATTENTION = tuple(row for row in llama.FAMILY.rows if row[0][:21] == "layers.{i}.attention.")
_NORMS: tuple[Row, ...] = tuple(
    (f"layers.{{i}}.{name}.weight", (f"{_BLOCK}.{hf_name}.weight",), ())
    for name, hf_name in (
        ("attention.q_norm", "self_attn.q_norm"),
        ("attention.k_norm", "self_attn.k_norm"),
        ("attention_norm_after", "post_attention_layernorm"),
        ("mlp_norm_after", "post_feedforward_layernorm"),
    )
)

FAMILY = Family(
    name="olmo2",
    kind="gpt",
    title="OLMo 2",
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    rows=(
        llama.START_ROWS[0],
        *_ATTENTION,
        *_NORMS,
        *llama.DENSE_ROWS,
        *llama.HEAD_ROWS,
    ),
    settings={
        **llama.FAMILY.settings,
        "norm_epsilon": Mapped("rms_norm_eps", absent=1e-5),
        "norm_placement": Constant("post"),
        "qk_layernorm": Constant(True),
        "qk_layernorm_scope": Constant("projection"),
    },
    custom=(rope(10000.0), attention_bias(absent=False, mlp=False)),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
