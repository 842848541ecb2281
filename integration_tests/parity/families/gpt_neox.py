"""GPT-NeoX and Pythia: parallel sublayers, LayerNorm, partly rotated heads, biases."""

from families.case import FamilyCase
from families.draws import heads, merged, partly_rotated, rope
from hypothesis import strategies as st

CASE = FamilyCase(
    family="gpt_neox",
    config_class="GPTNeoXConfig",
    model_class="GPTNeoXForCausalLM",
    mathematics="gpt_neox",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
    },
    draws=merged(
        st.fixed_dictionaries(
            {
                "num_hidden_layers": st.sampled_from((1, 2, 3)),
                "intermediate_size": st.sampled_from((20, 40, 56)),
                "vocab_size": st.sampled_from((101, 150)),
                "layer_norm_eps": st.sampled_from((1e-6, 1e-5, 1e-2)),
                "tie_word_embeddings": st.booleans(),
                "use_parallel_residual": st.booleans(),
                "attention_bias": st.booleans(),
                "hidden_act": st.sampled_from(
                    ("gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2", "silu")
                ),
            }
        ),
        heads(head_dim=False, groups=False),
        partly_rotated(rope("default", "linear", "dynamic", "yarn"), 0.5, 1.0),
    ),
    refused=frozenset({"hidden_act"}),
    others={
        "hidden_act": (
            *("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"),
            *("relu", "relu2", "silu", "mish"),
        )
    },
)
