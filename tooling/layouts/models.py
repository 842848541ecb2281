"""Models of the layouts, whose sizes no layout divides well."""

import json
from dataclasses import replace
from typing import Literal

from megatron_models import (
    BertConfig,
    EncoderDecoderConfig,
    GPTConfig,
    HybridConfig,
    MambaModelConfig,
    ModelConfig,
)

SEQUENCE = 16
LAYERS = 5

_SIZES = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 8,
    # 256 rows in memory: the third of four ranks holds 22 true ones, the fourth none.
    "vocab_size": 150,
    "max_position_embeddings": SEQUENCE,
}
MODELS: dict[str, ModelConfig] = {
    "tied": GPTConfig(**_SIZES, ffn_hidden_size=96),
    "untied": GPTConfig(
        **_SIZES,
        ffn_hidden_size=48,
        num_query_groups=4,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    ),
    "moe": GPTConfig(
        **_SIZES,
        ffn_hidden_size=48,
        num_query_groups=4,
        position_embedding_type="rope",
        softmax_type="learnable",
        num_experts=8,
        moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=16,
        moe_layer_freq="[1]*2+[0]+[1]*2",
        moe_aux_loss_coeff=0.02,
        moe_z_loss_coeff=0.01,
    ),
    "moe-gated": GPTConfig(
        **_SIZES,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        num_experts=4,
        moe_ffn_hidden_size=32,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.05,
    ),
}
MODELS["biased"] = replace(
    MODELS["moe"],
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.02,
    init_method_std=0.1,  # so that tokens differ and loads are nearly even
)
MODELS["grouped"] = replace(
    MODELS["biased"],
    moe_router_num_groups=2,
    moe_router_group_topk=1,
    moe_router_topk_scaling_factor=2.5,
    moe_router_add_bias=True,
    moe_shared_expert_gate=True,
    moe_input_jitter_eps=0.2,
    moe_seq_aux_loss_coeff=0.01,
)
MODELS["sinkhorn"] = replace(
    MODELS["moe"],
    moe_aux_loss_coeff=0.0,
    moe_router_load_balancing_type="sinkhorn",
    moe_router_pre_softmax=True,
    moe_apply_probs_on_input=True,
    init_method_std=0.1,
)
MODELS["choosing"] = replace(
    MODELS["moe"],
    moe_aux_loss_coeff=0.0,
    moe_router_expert_choice=True,
    moe_router_pre_softmax=True,
    init_method_std=0.1,
)
MODELS["forced"] = replace(MODELS["moe"], moe_router_force_load_balancing=True)
MODELS["thirds"] = replace(
    MODELS["moe"],
    hidden_size=36,
    num_attention_heads=6,
    num_query_groups=3,
    kv_channels=6,
    num_experts=6,
    moe_shared_expert_intermediate_size=18,
    init_method_std=0.1,
)
MODELS["step-loss"] = replace(
    MODELS["moe"], moe_aux_loss_coeff=0.0, moe_global_aux_loss_coeff=0.05, init_method_std=0.1
)
MODELS["dropping"] = replace(
    MODELS["moe"],
    softmax_type="vanilla",
    moe_expert_capacity_factor=0.7,
    moe_expert_rank_capacity_factor=1.5,
    init_method_std=0.1,  # so that weights differ
)
MODELS["earliest"] = replace(
    MODELS["dropping"],
    moe_token_drop_policy="position",
    moe_pad_expert_input_to_capacity=True,
    moe_expert_rank_capacity_factor=2.0,  # on tp4 a rank with few tokens sends most to one rank
)
MODELS["few"] = replace(
    MODELS["untied"],
    num_query_groups=2,
    add_qkv_bias=True,
    attn_logit_softcapping=0.3,
    softmax_type="learnable",
    sliding_window=5,
    window_attn_skip_freq="2",
    rotary_base_local=100.0,
    softmax_scale=0.4,
    qk_layernorm=True,
    qk_layernorm_scope="projection",
)
MODELS["scaled"] = GPTConfig(
    **_SIZES,
    ffn_hidden_size=48,
    num_query_groups=4,
    position_embedding_type="rope",
    normalization="RMSNorm",
    apply_layernorm_1p=True,
    norm_placement="sandwich",
    activation="geglu_tanh",
    add_bias_linear=False,
    embedding_multiplier=32**0.5,
    residual_multiplier=0.7,
    logits_scaling=0.5,
    final_logit_softcapping=0.4,
    qk_layernorm=True,
)
MODELS["parallel"] = GPTConfig(
    **_SIZES,
    ffn_hidden_size=96,
    num_query_groups=4,
    position_embedding_type="rope",
    parallel_residual="shared_norm",
    untie_embeddings_and_output_weights=True,
)
MODELS["gated"] = GPTConfig(
    **_SIZES,
    ffn_hidden_size=96,
    num_query_groups=2,
    position_embedding_type="alibi",
    attention_output_gate=True,
    attention_chunk_size=5,
    window_attn_skip_freq="2",
)
MODELS["unrotated"] = replace(
    MODELS["untied"],
    no_rope_freq="2",
    qk_l2_norm=True,
    attn_temperature_scale=3.0,
    attn_temperature_floor=2,
)
MODELS["latent"] = replace(
    MODELS["untied"],
    multi_latent_attention=True,
    num_query_groups=0,
    kv_channels=0,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
    qk_layernorm=True,
    add_qkv_bias=True,
)
MODELS["mtp"] = replace(MODELS["tied"], mtp_num_layers=2, mtp_loss_scaling_factor=0.5)
MODELS["moe-mtp"] = replace(
    MODELS["moe"],
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.6,
    untie_embeddings_and_output_weights=True,
)
MODELS["mixed"] = replace(
    MODELS["moe"],
    heterogeneous_layers_config_encoded_json=json.dumps(
        [
            {"attention": {"no_op": True}, "mlp": {"kind": "dense", "ffn_hidden_size": 64}},
            {
                "attention": {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8},
                "mlp": {"moe_ffn_hidden_size": 16, "moe_router_topk": 3},
            },
            {"attention": {"replace_with_linear": True}, "mlp": {"kind": "moe"}},
            {"attention": {"num_query_groups": 8}, "mlp": {"replace_with_linear": True}},
            {"mlp": {"no_op": True}},
        ]
    ),
)
MODELS["mup"] = replace(MODELS["moe"], use_mup=True, mup_base_hidden_size=8, mup_base_head_dim=2.0)
MODELS["sparse"] = replace(
    MODELS["latent"],
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=4,
    dsa_indexer_head_dim=8,
    dsa_indexer_topk=5,
    dsa_indexer_loss_coeff=0.2,
)
MODELS["delta"] = replace(
    MODELS["untied"],
    attention_output_gate=True,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="3",
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
)
_STATE = {
    "normalization": "RMSNorm",
    "mamba_num_groups": 4,
    "mamba_head_dim": 4,
    "mamba_state_dim": 6,
    "mamba_chunk_size": 6,
}
MODELS["mamba"] = MambaModelConfig(
    **{name: size for name, size in _SIZES.items() if name != "num_attention_heads"}, **_STATE
)
MODELS["hybrid"] = HybridConfig(
    **_SIZES,
    **_STATE,
    hybrid_layer_pattern="M*EM-",
    mamba_proj_bias=True,
    mamba_dt_max=0.08,
    num_query_groups=4,
    ffn_hidden_size=48,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_aux_loss_coeff=0.02,
)
MODELS["axes"] = replace(
    MODELS["untied"],
    position_embedding_type="mrope",
    kv_channels=12,
    mrope_section=(2, 3, 1),
    mtp_num_layers=1,
)
MODELS["sinusoidal"] = replace(MODELS["tied"], position_embedding_type="sinusoidal")
MODELS["bert"] = BertConfig(**_SIZES, ffn_hidden_size=96)
MODELS["bert-post"] = replace(
    MODELS["bert"],
    norm_placement="sum",
    embedding_norm=True,
    num_tokentypes=3,
    task_head="classification",
)
MODELS["t5-learned"] = EncoderDecoderConfig(
    **{**_SIZES, "num_layers": 3}, encoder_num_layers=2, ffn_hidden_size=96
)
MODELS["t5"] = replace(
    MODELS["t5-learned"],
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    normalization="RMSNorm",
    activation="geglu_tanh",
    add_bias_linear=False,
    ffn_hidden_size=48,
    softmax_scale=1.0,
    logits_scaling=4.0,
)
"""Models by name: GPT-2's kind, Llama's kind and mixtures of experts.

`tied` has learned positions, LayerNorm, biases and tied embeddings. `untied` is Llama's kind; `few`
is the same with two KV heads, biases of queries, bounded attention scores, sinks, and norms of
whole projections of queries and keys; `latent`
has multi-latent attention, latents of queries and biases of projections to latents. `moe` has
biases in its experts, a shared expert, attention sinks and both losses of a router. `biased` is
`moe` with sigmoid scores and biases of experts, which are state, not parameters. `grouped` is
`biased` with groups of experts, scaled weights and noise on the inputs of routers. `sinkhorn`
selects experts by Sinkhorn's algorithm, and `step-loss` balances them over the micro-batches of a
step; data-parallel ranks count the selections of each other, so a layout with them cannot equal one
rank (integration_tests/test_global_balancing.py). The experts of `choosing` select tokens; without
dropout, equal tokens at the beginnings of documents would be chosen between by rounding. Those of
`forced` get tokens in turn, by their index on a context-parallel rank, so a layout with such ranks
is another model. `thirds` is `moe` for three ranks, which do not divide its tokens. `scaled` is
Gemma's kind: norms of each sublayer and head with gains of 1 + weight, GeGLU, multipliers and
bounded logits. `parallel` is Falcon's kind: attention and feed-forward layer read
one normed input. `gated` has gates of the output of attention, linear biases by distance and
chunks. `unrotated` is Llama 4's kind: norms of rotated queries and keys, and layers without rotary
positions, whose queries grow with the position. The experts of `dropping` and `earliest` have a
capacity; those of `earliest` keep the earliest tokens and are padded. `mtp` is `tied` with two
depths of multi-token prediction, and `moe-mtp` is `moe` with them and an untied output matrix.
The layers of `mixed` differ in heads, widths and kinds; some lack a sublayer or have a linear layer
in its place. `mup` is `moe` with maximal update parametrization from a width of 8. `delta` is
Qwen3-Next's kind: gated delta nets in all layers but the third, which has gated attention. `sparse`
is `latent` with an indexer that selects five keys for each query, and its loss.
`mamba` has Mamba-2 layers alone. `hybrid` has Mamba-2, attention, experts and a dense
feed-forward layer. `bert` is Megatron-LM's encoder with both heads of pretraining; `bert-post` has
post-LN and a norm of the embeddings, as BERT, and is trained to classify.
`sinusoidal` is `tied` with fixed positions. `axes` is `untied` with drawn times, heights and widths
of tokens, and one depth of multi-token prediction. `t5` is T5 with biases by
relative position and one embedding for both sides and the output, of two encoder and three decoder
layers; `t5-learned` is Megatron-LM's, with learned positions.
"""

Model = Literal[
    "tied",
    "untied",
    "moe",
    "moe-gated",
    "biased",
    "grouped",
    "sinkhorn",
    "choosing",
    "forced",
    "thirds",
    "step-loss",
    "dropping",
    "earliest",
    "few",
    "scaled",
    "parallel",
    "latent",
    "gated",
    "unrotated",
    "mtp",
    "moe-mtp",
    "mixed",
    "mup",
    "delta",
    "sparse",
    "mamba",
    "hybrid",
    "bert",
    "bert-post",
    "sinusoidal",
    "axes",
    "t5",
    "t5-learned",
]
