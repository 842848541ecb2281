"""T5 and Flan-T5: biases by relative position, ReLU or gated units, tied or not."""

from families.case import FamilyCase
from families.draws import merged
from hypothesis import strategies as st

CASE = FamilyCase(
    family="t5",
    config_class="T5Config",
    model_class="T5ForConditionalGeneration",
    mathematics="t5",
    settings={
        "num_layers": 2,
        "num_decoder_layers": 3,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_heads": 4,
        "vocab_size": 150,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "feed_forward_proj": "gated-gelu",
        "scale_decoder_outputs": False,  # else logits are small
        "dropout_rate": 0.0,
    },
    draws=merged(
        st.fixed_dictionaries(
            {
                "num_layers": st.sampled_from((1, 2, 3)),
                "num_decoder_layers": st.sampled_from((None, 1, 2, 3)),
                "d_ff": st.sampled_from((20, 40, 56)),
                "vocab_size": st.sampled_from((101, 150)),
                "layer_norm_epsilon": st.sampled_from((1e-6, 1e-5, 1e-2)),
                "feed_forward_proj": st.sampled_from(
                    ("relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu")
                ),
                "tie_word_embeddings": st.booleans(),
                "relative_attention_num_buckets": st.sampled_from((8, 9, 32)),
                "relative_attention_max_distance": st.sampled_from((17, 20, 128)),
            }
        ),
        st.tuples(st.sampled_from((1, 3, 4)), st.sampled_from((8, 12))).map(
            lambda drawn: {"num_heads": drawn[0], "d_kv": drawn[1], "d_model": 12}
        ),
    ),
    others={
        "scale_decoder_outputs": (False,),
        "feed_forward_proj": ("relu", "gated-silu"),
        "dense_act_fn": ("silu",),
        # Their class ties weights in any case, and never writes False.
        "tie_word_embeddings": (True,),
    },
    refused_axes=frozenset({"cp"}),
    comparison="families.encoder_decoders:ENCODER_DECODER",
)
