"""Mixtral: Llama's attention and a mixture of experts with softmax over the selected logits."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="mixtral",
    config_class="MixtralConfig",
    model_class="MixtralForCausalLM",
    mathematics="mixtral",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    draws=merged(
        sizes(num_experts_per_tok=st.sampled_from((1, 2, 3)), num_local_experts=st.just(5)),
        heads(),
        rope("default", "linear", "llama3"),
        optional(sliding_window=st.sampled_from((None, 5, 40))),
    ),
    refused=frozenset({"hidden_act", "rope_parameters"}),
)
