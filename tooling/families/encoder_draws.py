"""Settings of encoders that BERT, RoBERTa and MiniLM share."""

from typing import Any, Final

from hypothesis import strategies as st

from families.draws import Settings, merged

SETTINGS: Final[dict[str, Any]] = {
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "vocab_size": 150,
    # Gradients are compared in training mode, too.
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""A small ``config.json``."""

OTHERS: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_dropout_prob": (0.5,),
    "attention_probs_dropout_prob": (0.5,),
    "classifier_dropout": (0.5,),
    "hidden_act": ("gelu", "gelu_new", "relu", "mish"),
}

REFUSED: Final = frozenset(
    {"add_cross_attention", "hidden_act", "is_decoder", "tie_word_embeddings"}
)


def encoder(activations: tuple[str, ...]) -> Settings:
    """Returns the strategy of depth, widths, vocabulary, types, epsilon and activation."""
    return merged(
        st.fixed_dictionaries(
            {
                "num_hidden_layers": st.sampled_from((1, 2, 3)),
                "intermediate_size": st.sampled_from((20, 40, 56)),
                "vocab_size": st.sampled_from((101, 150)),
                "type_vocab_size": st.sampled_from((1, 2, 3)),
                "layer_norm_eps": st.sampled_from((1e-12, 1e-5, 1e-2)),
                "hidden_act": st.sampled_from(activations),
            }
        ),
        st.tuples(st.sampled_from((1, 3, 4)), st.sampled_from((8, 12))).map(
            lambda drawn: {
                "num_attention_heads": drawn[0],
                "hidden_size": drawn[0] * drawn[1],
            }
        ),
    )
