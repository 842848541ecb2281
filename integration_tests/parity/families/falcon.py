"""Falcon: parallel sublayers with one norm or two, and one or several keys and values."""

from typing import Any

from families.case import FamilyCase
from families.draws import heads, merged, rope
from hypothesis import strategies as st


def _with_layers(drawn: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    layers, sizes = drawn
    if not layers.get("new_decoder_architecture") and not layers.get("multi_query", True):
        sizes = {**sizes, "num_key_value_heads": sizes["num_attention_heads"]}
    if layers.get("alibi"):  # biases that transformers does not round
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes["num_kv_heads"] = sizes.pop("num_key_value_heads")
    return layers | sizes


_LAYERS = st.sampled_from(
    (
        {},
        {"multi_query": False},
        {"parallel_attn": False},
        {"parallel_attn": False, "multi_query": False, "bias": True},
        {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
        {"alibi": True},
        {"new_decoder_architecture": True},
        {"new_decoder_architecture": True, "bias": True, "num_ln_in_parallel_attn": 2},
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    )
)

CASE = FamilyCase(
    family="falcon",
    config_class="FalconConfig",
    model_class="FalconForCausalLM",
    mathematics="gpt_neox",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "ffn_hidden_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
    },
    draws=merged(
        st.fixed_dictionaries(
            {
                "num_hidden_layers": st.sampled_from((1, 2, 3)),
                "ffn_hidden_size": st.sampled_from((None, 40, 56)),
                "vocab_size": st.sampled_from((101, 150)),
                "layer_norm_epsilon": st.sampled_from((1e-6, 1e-5, 1e-2)),
                "tie_word_embeddings": st.booleans(),
                "activation": st.sampled_from(("gelu", "gelu_new", "relu")),
                # the settings of the layouts have others
                "new_decoder_architecture": st.just(False),
                "num_ln_in_parallel_attn": st.none(),
            }
        ),
        st.tuples(_LAYERS, heads(head_dim=False)).map(_with_layers),
        rope("default", "linear", "dynamic"),
    ),
    refused=frozenset(
        {"activation", "parallel_attn"} | {"num_ln_in_parallel_attn", "rope_parameters"}
    ),
    attention="sdpa",  # with eager attention, transformers 5.23 adds the biases of ALiBi twice
    others={
        "activation": ("gelu_new", "relu", "mish"),
        "ffn_hidden_size": (None, 56),
        "output_attentions": (False,),  # not returned by this attention
        "num_kv_heads": (1, 4),
        "num_ln_in_parallel_attn": (None, 2, 3),
    },
)
