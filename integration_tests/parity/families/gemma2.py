"""Gemma 2: norms around sublayers, windows in every other layer, bounded scores and logits."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="gemma2",
    config_class="Gemma2Config",
    model_class="Gemma2ForCausalLM",
    mathematics="gemma2",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    draws=merged(
        sizes(
            attention_bias=st.booleans(),
            attn_logit_softcapping=st.sampled_from((None, 2.0, 50.0)),
            final_logit_softcapping=st.sampled_from((None, 4.0, 30.0)),
            query_pre_attn_scalar=st.sampled_from((7, 20, 256)),
        ),
        heads(),
        rope("default", "linear", "yarn"),
        optional(
            hidden_activation=st.sampled_from(("gelu", "gelu_pytorch_tanh", "silu")),
            sliding_window=st.sampled_from((5, 40)),
        ),
    ),
    refused=frozenset(
        {"hidden_activation", "layer_types", "rope_parameters", "use_bidirectional_attention"}
    ),
    others={
        "hidden_activation": ("gelu", "relu", "mish"),
        "layer_types": (
            ["full_attention"] * 5,
            ["full_attention"] * 2 + ["sliding_attention"] * 3,
            ["chunked_attention"] * 5,
        ),
        "use_bidirectional_attention": (False, True),
        "attn_logit_softcapping": (None, 30.0),
        "final_logit_softcapping": (None, 30.0),
    },
)
