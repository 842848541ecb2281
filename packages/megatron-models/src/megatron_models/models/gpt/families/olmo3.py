"""OLMo 3: norms after each sublayer and of whole projections, windows in three of four layers.

Olmo Team, 2025. Scaling of rotary positions applies to the layers without a window only.
"""

from megatron_models.families.family import Family, Row
from megatron_models.families.settings import Constant, Mapped
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.local_rope import local_rope
from megatron_models.models.gpt.families.qwen3 import ATTENTION_ROWS
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import except_every, windows

_NORMS = {
    "attention_norm_after": "post_attention_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
}
_ROWS: tuple[Row, ...] = (
    *(row for row in llama.START_ROWS if "_norm." not in row[0]),
    *ATTENTION_ROWS,
    *(
        (f"layers.{{i}}.{name}.weight", (f"model.layers.{{i}}.{hf_name}.weight",), ())
        for name, hf_name in _NORMS.items()
    ),
    *llama.DENSE_ROWS,
    *llama.HEAD_ROWS,
)
_WINDOWS = windows(except_every(4), absent=4096)

FAMILY = Family(
    name="olmo3",
    kind="gpt",
    title="OLMo 3",
    architectures=("Olmo3ForCausalLM",),
    model_type="olmo3",
    rows=_ROWS,
    settings={
        **llama.FAMILY.settings,
        "norm_epsilon": Mapped("rms_norm_eps", absent=1e-5),
        "norm_placement": Constant("post"),
        "qk_layernorm": Constant(True),
        "qk_layernorm_scope": Constant("projection"),
    },
    custom=(_WINDOWS, local_rope(rope(5e5), base=5e5), attention_bias(absent=False, mlp=False)),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored[:1],
    prefix="model.",
)
