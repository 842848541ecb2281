"""OLMo 2: norms after sublayers, and of all queries and all keys."""

from families.case import FamilyCase
from families.draws import heads, merged, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="olmo2",
    config_class="Olmo2Config",
    model_class="Olmo2ForCausalLM",
    mathematics="olmo2",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        # Norms of outputs that are far below the epsilon would enlarge rounding in every layer.
        "initializer_range": 0.2,
    },
    draws=merged(
        sizes(attention_bias=st.booleans()),
        heads(),
        rope("default", "linear", "llama3", "yarn"),
    ),
    refused=frozenset({"hidden_act", "rope_parameters"}),
)
