"""GLM-4: sandwich norms, and half of each head rotated in neighbouring pairs."""

from families.case import FamilyCase
from families.draws import heads, merged, partly_rotated, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="glm4",
    config_class="Glm4Config",
    model_class="Glm4ForCausalLM",
    mathematics="glm4",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        # transformers' defaults are outside this vocabulary
        "pad_token_id": 0,
        "eos_token_id": [1],
    },
    draws=merged(
        sizes(attention_bias=st.booleans()),
        st.tuples(heads(), st.sampled_from((8, 16))).map(
            lambda drawn: {**drawn[0], "head_dim": drawn[1]}
        ),
        partly_rotated(rope("default", "linear", "dynamic", "yarn"), 0.5, 1.0),
    ),
    refused=frozenset({"hidden_act"}),
    others={"head_dim": (4, 12)},
)
