"""DeepSeek-V3: multi-latent attention and sigmoid routing with biases (DeepSeek-AI, 2024).

Files hold the matrices of each expert separately. The norms of latents have an epsilon of 1e-6 for
every ``rms_norm_eps``.

``num_nextn_predict_layers`` counts the depths of multi-token prediction. transformers counts them
in every ``config.json`` but writes no tensors of them; such a file is read as a model without them.
A file with their tensors repeats the embedding and the output matrix at each depth; copies that
differ are refused.
"""

from megatron_models.families.family import Family
from megatron_models.families.settings import Constant, Mapped, Translated
from megatron_models.models.gpt.families.deepseek_rows import (
    BIASES,
    DEPTH_ROWS,
    ROWS,
    SHARED_ROWS,
)
from megatron_models.models.gpt.families.deepseek_settings import (
    COUNTS,
    DEPTHS,
    EPSILON,
    NORMALIZATION,
    ROTATED,
    SETTINGS,
    WITHOUT_EFFECT,
    attention,
    dense_layers,
    expert_groups,
    released_code,
    shared_experts,
)
from megatron_models.models.gpt.families.rope import rope

FAMILY = Family(
    name="deepseek_v3",
    kind="gpt",
    title="DeepSeek-V3",
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    rows=(
        *SHARED_ROWS,
        *(row for row in ROWS if row[0] not in ("embedding.word.weight", "output.weight")),
        BIASES,
        *DEPTH_ROWS,
    ),
    settings={
        **SETTINGS,
        "rotary_interleaved": Translated(
            "rope_interleave", ((True, True), (False, False), (None, False)), absent=True
        ),
        "num_experts": Mapped("n_routed_experts", absent=256),
        "moe_router_topk": Mapped("num_experts_per_tok", absent=8),
        "moe_router_topk_scaling_factor": Mapped("routed_scaling_factor", absent=2.5),
        "moe_router_score_function": Constant("sigmoid"),
        "moe_router_enable_expert_bias": Constant(True),
    },
    custom=(
        rope(10000.0, latent=True),
        attention(128),
        ROTATED,
        dense_layers(3),
        shared_experts(1, 2048),
        expert_groups(8, 4),
        EPSILON,
        NORMALIZATION,
        DEPTHS,
    ),
    if_absent={"model.layers.{i}.eh_proj.weight": dict.fromkeys(COUNTS, 0)},
    neutral={
        "auto_map": released_code("V3"),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "pretraining_tp": (1,),
    },
    without_effect=WITHOUT_EFFECT,
    exported_constants={"attention_dropout": 0.0},
    prefix="model.",
)
