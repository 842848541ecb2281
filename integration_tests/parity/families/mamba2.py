"""Mamba-2: state-space layers alone."""

from typing import Any

from families.case import FamilyCase
from families.draws import merged, optional
from hypothesis import strategies as st


def _widths(drawn: tuple[int, int, int, int]) -> dict[str, Any]:
    groups, per_group, head, expand = drawn
    heads = groups * per_group * expand
    return {
        "n_groups": groups,
        "num_heads": heads,
        "head_dim": head,
        "expand": expand,
        "hidden_size": heads * head // expand,
    }


CASE = FamilyCase(
    family="mamba2",
    config_class="Mamba2Config",
    model_class="Mamba2ForCausalLM",
    mathematics="mamba2",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 6,
        "n_groups": 4,
        "vocab_size": 150,
        "chunk_size": 8,
        "residual_in_fp32": False,
    },
    draws=merged(
        st.tuples(
            st.sampled_from((1, 2, 3)),
            st.sampled_from((1, 2)),
            st.sampled_from((8, 12)),
            st.sampled_from((1, 2)),
        ).map(_widths),
        st.fixed_dictionaries(
            {
                "num_hidden_layers": st.sampled_from((1, 2, 3)),
                "state_size": st.sampled_from((4, 7)),
                "conv_kernel": st.sampled_from((2, 4)),
                "vocab_size": st.sampled_from((101, 150)),
                "use_bias": st.booleans(),
                "use_conv_bias": st.booleans(),
                "layer_norm_epsilon": st.sampled_from((1e-5, 1e-2)),
                "tie_word_embeddings": st.booleans(),
            }
        ),
        optional(
            time_step_limit=st.sampled_from(((0.0, 0.5), (0.1, 1.0))),
            hidden_act=st.sampled_from(("silu", "swish")),
        ),
    ),
    refused=frozenset({"hidden_act"}),
    others={
        "n_groups": (2,),
        "num_heads": (16,),
        "head_dim": (4,),
        "expand": (4,),
        "hidden_size": (16,),
        "time_step_limit": ([0.0, 0.5], [0.1, 2.0]),
        "time_step_rank": (3,),
    },
    coupled={
        "num_heads": {"head_dim": 4},
        "head_dim": {"num_heads": 16},
        "expand": {"num_heads": 16},
        "hidden_size": {"num_heads": 4},
    },
)
