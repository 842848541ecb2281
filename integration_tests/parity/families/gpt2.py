"""GPT-2: learned positions, LayerNorm, biases, one matrix for queries, keys and values."""

from families.case import FamilyCase
from families.draws import merged
from hypothesis import strategies as st

CASE = FamilyCase(
    family="gpt2",
    config_class="GPT2Config",
    model_class="GPT2LMHeadModel",
    mathematics="gpt2",
    settings={
        "n_layer": 5,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 48,
        "vocab_size": 150,
        # The draws of weights are compared in training mode, too.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    draws=merged(
        st.fixed_dictionaries(
            {
                "n_layer": st.sampled_from((1, 2, 3)),
                "n_inner": st.sampled_from((None, 40, 56)),
                "vocab_size": st.sampled_from((101, 150)),
                "layer_norm_epsilon": st.sampled_from((1e-6, 1e-5, 1e-2)),
                "tie_word_embeddings": st.booleans(),
                "activation_function": st.sampled_from(
                    (
                        "gelu_new",
                        "gelu_pytorch_tanh",
                        "gelu_fast",
                        "gelu",
                        "quick_gelu",
                        "relu",
                        "silu",
                    )
                ),
            }
        ),
        st.tuples(st.sampled_from((1, 3, 4)), st.sampled_from((8, 12))).map(
            lambda drawn: {"n_head": drawn[0], "n_embd": drawn[0] * drawn[1]}
        ),
    ),
    refused=frozenset(
        {
            "activation_function",
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "add_cross_attention",
        }
    ),
    others={"activation_function": ("gelu", "gelu_fast", "quick_gelu", "relu2", "mish")},
)
