"""SmolLM3: Llama with layers that have no rotary positions."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="smollm3",
    config_class="SmolLM3Config",
    model_class="SmolLM3ForCausalLM",
    mathematics="smollm3",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "no_rope_layers": [1, 0, 1, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 7,
        "pad_token_id": 0,
    },
    draws=merged(
        sizes(attention_bias=st.booleans(), mlp_bias=st.booleans()),
        heads(),
        optional(
            hidden_act=st.sampled_from(("silu", "swish")),
            no_rope_layers=st.sampled_from((None, [0, 1, 1, 0, 1], [1, 1, 1, 1, 1])),
            no_rope_layer_interval=st.sampled_from((2, 3)),
            use_sliding_window=st.booleans(),
            sliding_window=st.sampled_from((None, 5, 40)),
        ),
        rope("default", "linear", "yarn"),
    ),
    refused=frozenset({"hidden_act", "rope_parameters", "no_rope_layers"}),
    others={
        "num_hidden_layers": (2, 4),
        "layer_types": (["sliding_attention"] * 5,),
        "no_rope_layers": ([0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [2, 0, 1, 1, 0]),
    },
)
