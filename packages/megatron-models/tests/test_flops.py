import pytest
import torch
from megatron_models import GPT
from megatron_models.flops import training_flops
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.parameters import parameter_count
from megatron_parallel import Mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def model(layers, hidden, heads, vocab, **others):
    return GPTConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=8192,
        **others,
    )


LLAMA3_8B = {
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}


MIXTRAL_8X7B = {**LLAMA3_8B, "num_experts": 8, "moe_router_topk": 2}


# Megatron-LM's formula for published models, to seven digits.
@pytest.mark.parametrize(
    ("config", "sequence_length", "expected"),
    [
        (model(96, 12288, 96, 51200), 2048, 2.174868e15),
        (model(32, 4096, 32, 128256, **LLAMA3_8B), 8192, 4.216455e14),
        (model(24, 1024, 16, 50304), 1024, 2.326530e12),
        (model(32, 4096, 32, 32000, **MIXTRAL_8X7B), 4096, 3.264776e14),
    ],
    ids=["gpt3-175b", "llama3-8b", "gpt2-345m", "mixtral-8x7b"],
)
def test_flops_per_sequence_equal_those_of_megatron(config, sequence_length, expected):
    assert training_flops(config, sequence_length) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("knob", "pairs"),
    [
        ({"sliding_window": 16}, 128 * 16 - 16 * 16 // 2),
        ({"attention_chunk_size": 16}, 8 * 16 * 16 // 2),
        ({"sliding_window": 16, "attention_chunk_size": 16}, 8 * 16 * 16 // 2),
        ({"sliding_window": 500, "attention_chunk_size": 500}, 128 * 128 // 2),
    ],
    ids=str,
)
def test_windows_count_the_pairs_in_them(knob, pairs):
    """As in full attention, which has half of the square, half of the diagonal is left out."""
    config = model(3, 64, 4, 512, window_attn_skip_freq="[1,0,1]", **knob)
    less = training_flops(model(3, 64, 4, 512), 128) - training_flops(config, 128)
    of_a_pair = 3 * 2 * 2 * 64  # passes, operations, score and value, channels
    assert less == 2 * of_a_pair * (128 * 128 // 2 - pairs)
    assert training_flops(config, 128, tokens=512) == 4 * training_flops(config, 128)


@pytest.mark.parametrize("rank", [0, 1536])
def test_latent_attention_counts_the_terms_of_megatron_without_norms(rank):
    """Megatron-LM adds one multiply-add for each channel of a latent, for its norm."""
    hidden, heads, length, layers = 2048, 16, 4096, 3
    latent = {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "q_lora_rank": rank,
        "kv_lora_rank": 512,
        "v_head_dim": 96,
    }
    plain = training_flops(model(layers, hidden, heads, 512), length)
    own = training_flops(model(layers, hidden, heads, 512, **latent), length)
    queries = heads * (128 + 64)
    of_queries = rank * (hidden + queries) if rank else hidden * queries
    of_keys_values = 512 * (hidden + heads * (128 + 96)) + hidden * 64
    of_pairs = length // 2 * (queries + heads * 96)
    token = of_queries + of_keys_values + heads * 96 * hidden + of_pairs
    usual = 4 * hidden * hidden + length * hidden
    assert own - plain == 3 * 2 * length * layers * (token - usual)


def test_gated_delta_nets_count_the_terms_of_megatron():
    """Projections, convolution, and four products of each state; a long text costs no more."""
    hidden, length = 2048, 4096
    delta = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "[1,0,1]",
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 24,
        "linear_conv_kernel_dim": 3,
    }
    own = training_flops(model(3, hidden, 16, 512, **delta), length)
    plain = training_flops(model(3, hidden, 16, 512), length)
    keys, values = 8 * 96, 24 * 64
    projections = hidden * (2 * keys + 2 * values + 2 * 24) + values * hidden
    token = projections + 3 * (2 * keys + values) + 24 * 4 * 96 * 64
    usual = 4 * hidden * hidden + length * hidden
    assert own - plain == 3 * 2 * length * 2 * (token - usual)


def test_flops_grow_with_tokens_and_shrink_with_packing():
    config = model(2, 64, 4, 512)
    one = training_flops(config, 128)
    assert training_flops(config, 128, tokens=5 * 128) == 5 * one
    packed = training_flops(config, 128, squared_lengths=64**2 + 64**2)
    halves = training_flops(config, 64, tokens=128)
    assert packed == halves < one


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (model(32, 4096, 32, 128256, **LLAMA3_8B), 8_030_261_248),
        (model(32, 4096, 32, 32000, **MIXTRAL_8X7B), 46_702_792_704),
        (
            GPTConfig(
                num_layers=12,
                hidden_size=768,
                num_attention_heads=12,
                vocab_size=50257,
                max_position_embeddings=1024,
            ),
            124_439_808,
        ),
    ],
    ids=["llama3-8b", "mixtral-8x7b", "gpt2-124m"],
)
def test_parameter_counts_equal_published_ones(config, expected):
    assert parameter_count(config) == expected


def test_active_parameters_of_a_mixture_equal_the_published_number():
    """Mixtral-8x7B uses 12.9 of its 46.7 billion parameters for a token (Jiang et al., 2024)."""
    config = model(32, 4096, 32, 32000, **MIXTRAL_8X7B)
    idle = 32 * 6 * 3 * 4096 * 14336  # six of eight experts in each layer, three matrices each
    assert parameter_count(config, active=True) == parameter_count(config) - idle
    assert round(parameter_count(config, active=True) / 1e9, 1) == 12.9


def grouped(left, right, *_, out_shape=None):
    """Counts a grouped product of rows or for weights, which torch's counter does not know."""
    assert (len(left), len(right)) in ((2, 2), (2, 3))
    return 2 * left[0] * left[1] * right[-1]


GATED = {"normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope"}
TINY = {
    "gpt2": {},
    "llama": GATED
    | {
        "activation": "swiglu",
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "heterogeneous": {
        "heterogeneous_layers_config_encoded_json": '[{"attention": {"no_op": true}}, '
        '{"attention": {"num_query_groups": 2}, "mlp": {"replace_with_linear": true}}, '
        '{"attention": {"num_attention_heads": 2, "num_query_groups": 1}, '
        '"mlp": {"ffn_hidden_size": 96}}]',
    },
    "parallel": {"parallel_residual": "two_norms", "activation": "squared_relu"},
    "sinks": {"softmax_type": "learnable", "num_query_groups": 1},
    "bounded": GATED
    | {
        "norm_placement": "sandwich",
        "activation": "geglu_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "latent": GATED
    | {
        "multi_latent_attention": True,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 24,  # as wide as queries, so that no kernel pads it
    },
    "experts": GATED
    | {
        "activation": "swiglu",
        "num_experts": 4,
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 32,
    },
    "groups": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 48,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_layer_freq": "[0]+[1]*2",
    },
}


@pytest.mark.parametrize("name", TINY)
def test_flops_equal_those_that_torch_counts(name):
    """Routers are left out of the formula, as in Megatron-LM, so one percent is allowed."""
    config = GPTConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=32,
        **TINY[name],
    )
    model, text = GPT(config, Mesh.single()), torch.arange(66).reshape(2, 33)
    # torch counts the products of plain attention, and all query-key pairs instead of half.
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
    with sdpa_kernel(SDPBackend.MATH), counter:
        model.loss(text[:, :-1], text[:, 1:]).mean().backward()
    expected = training_flops(config, 32, tokens=64, squared_lengths=2 * 2 * 32**2)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
