"""Small copies of models: the layers that remain, and sizes that keep their order."""

import dataclasses

import pytest
from megatron_models import (
    ConfigError,
    EncoderDecoderConfig,
    GPTConfig,
    HybridConfig,
    ModelConfig,
    layers_alike,
    shrunk,
    smaller_sizes,
    with_layers,
)
from megatron_parallel import ParallelLayout

SIZES = {"hidden_size": 4096, "vocab_size": 128256, "max_position_embeddings": 8192}
LLAMA = GPTConfig(
    **SIZES,
    num_layers=32,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
DEEPSEEK = GPTConfig(
    **SIZES,
    num_layers=61,
    num_attention_heads=128,
    position_embedding_type="rope",
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_layernorm=True,
    num_experts=256,
    moe_router_topk=8,
    moe_router_num_groups=8,
    moe_router_group_topk=4,
    moe_router_score_function="sigmoid",
    moe_ffn_hidden_size=2048,
    moe_layer_freq="[0]*3+[1]*58",
)
PATTERNED = dataclasses.replace(
    LLAMA,
    num_layers=8,
    sliding_window=1024,
    window_attn_skip_freq="4",
    no_rope_freq="3",
    num_experts=8,
    moe_layer_freq="2",
)
HYBRID = HybridConfig(
    **SIZES,
    num_attention_heads=32,
    hybrid_layer_pattern="MM*-|MMM-",
    mamba_num_groups=4,
)
T5 = EncoderDecoderConfig(**SIZES, num_layers=6, encoder_num_layers=4, num_attention_heads=32)


def fits(tp: int, ep: int = 1):
    layout = ParallelLayout(tp=tp, ep=ep, dp=ep)

    def accepts(config: ModelConfig) -> bool:
        try:
            config.check_layout(layout)
        except ConfigError:
            return False
        return True

    return accepts


def test_a_small_llama_keeps_grouped_heads_that_four_ranks_divide() -> None:
    whole = fits(4)
    small = shrunk(
        with_layers(LLAMA, [0, 31]), lambda m: whole(m) and m.num_query_groups % 4 == 0, 8192
    )
    assert small.num_layers == 2
    assert (small.num_attention_heads, small.num_query_groups) == (8, 4)
    assert small.num_attention_heads % 4 == small.ffn_hidden_size % 4 == 0
    assert small.hidden_size < 64 and small.vocab_size < 256 and small.kv_channels % 2 == 0
    assert small.activation == "swiglu" and small.untie_embeddings_and_output_weights


def test_a_small_mixture_of_experts_selects_some_experts_of_some_groups() -> None:
    small = shrunk(with_layers(DEEPSEEK, [0, 3, 60]), fits(2, ep=2), 4096)
    assert small.num_experts % 2 == 0
    assert 1 <= small.moe_router_group_topk < small.moe_router_num_groups
    assert small.moe_router_topk < small.num_experts <= 16
    assert small.moe_layers == (False, True, True)
    assert small.q_lora_rank > small.kv_lora_rank > small.qk_head_dim
    assert small.kv_channels == small.qk_head_dim + small.qk_pos_emb_head_dim


def test_sizes_that_nothing_reads_are_kept() -> None:
    small = shrunk(with_layers(LLAMA, [0]), fits(1), 8192)
    assert small.kv_lora_rank == LLAMA.kv_lora_rank
    assert small.sliding_window == 0


def test_sizes_that_others_determine_are_determined_again() -> None:
    model = GPTConfig(**SIZES, num_layers=1, num_attention_heads=32, kv_channels=64, use_mup=True)
    assert model.mup_base_hidden_size == 4096
    small = shrunk(model, lambda _: True)
    assert small.mup_base_hidden_size == small.hidden_size < 64


def test_a_window_that_no_sample_exceeds_is_kept() -> None:
    model = dataclasses.replace(LLAMA, num_layers=1, sliding_window=4096)
    assert shrunk(model, fits(1), 4096).sliding_window == 4096
    assert shrunk(model, fits(1), 8192).sliding_window < 16


@pytest.mark.parametrize("model", [PATTERNED, DEEPSEEK, HYBRID, T5], ids=lambda m: m.kind)
def test_chosen_layers_are_those_of_the_model(model: ModelConfig) -> None:
    kinds = layers_alike(model)
    chosen = [0, 2, 3, model.depth - 2, model.depth - 1]
    found = layers_alike(with_layers(model, chosen))
    expected = [kinds[layer] for layer in chosen]
    for i in range(len(chosen)):
        for j in range(i):
            assert (found[i] == found[j]) == (expected[i] == expected[j])
    layers = [
        layer for trunk in with_layers(model, chosen).trunks().values()
        for layer in trunk.layers.values()
    ]  # fmt: skip
    whole = [layer for trunk in model.trunks().values() for layer in trunk.layers.values()]
    for own, number in zip(layers, chosen, strict=True):
        assert [type(part.mixer) for part in own] == [type(part.mixer) for part in whole[number]]
        assert [part.mixer.spans() for part in own] == [
            part.mixer.spans() for part in whole[number]
        ]
        assert [len(part.mixer.rotations()) for part in own] == [
            len(part.mixer.rotations()) for part in whole[number]
        ]


def test_a_section_of_settings_shrinks_with_what_is_accepted() -> None:
    @dataclasses.dataclass(frozen=True)
    class Settings:
        a: int = dataclasses.field(default=100, metadata={"small": 3})
        b: int = dataclasses.field(default=7, metadata={"small": 3})
        kept: int = 1000

    assert smaller_sizes(Settings(200), lambda copy: copy.a % 5 == 0) == Settings(5, 3)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Two sizes that are compared."""

    a: int = dataclasses.field(default=20, metadata={"small": 3})
    b: int = dataclasses.field(default=9, metadata={"small": 3})


@pytest.mark.parametrize(
    ("value", "accepted", "found"),
    [
        (1000, {66}, 66),  # each size up to 63 above the small one
        (1000, {67}, 1000),
        (134, {67}, 67),  # then halves
        (1000, {125, 250, 500}, 125),
        (200, {100, 150}, 100),
        (5, {4, 5}, 4),
        (3, {2, 3}, 3),
        (2, {1, 2}, 2),
        (20, {3, 5}, 3),  # of a default the small size and halves alone
        (20, {4}, 20),
        (20, {5, 10}, 5),
    ],
)
def test_sizes_near_the_small_one_and_halves_are_tried(value, accepted, found) -> None:
    shrinking = smaller_sizes(Sizes(value), lambda copy: copy.a in accepted, {"b"})
    assert shrinking == Sizes(found)


def test_sizes_keep_their_order_and_equal_ones_stay_equal() -> None:
    assert smaller_sizes(Sizes(200, 7), lambda _: True) == Sizes(4, 3)
    assert smaller_sizes(Sizes(7, 200), lambda _: True) == Sizes(3, 4)
    assert smaller_sizes(Sizes(7, 7), lambda _: True) == Sizes(3, 3)


@dataclasses.dataclass(frozen=True)
class Determined:
    """A size that determines another; a field that has to be given comes before it."""

    base: int = dataclasses.field(default=40, metadata={"small": 2})
    given: int = dataclasses.field(default=5, metadata={"derived": True})
    twice: int = dataclasses.field(default=0, metadata={"derived": True})
    least: int = 0

    def __post_init__(self) -> None:
        if not self.given:
            raise ValueError("given is needed")
        if not self.twice:
            if self.base < self.least:
                raise ValueError("give twice")
            object.__setattr__(self, "twice", 2 * self.base)


def test_a_size_is_determined_again_or_kept() -> None:
    model = Determined()
    assert model.twice == 80
    assert smaller_sizes(model, lambda _: True) == Determined(2, 5, 4)
    kept = smaller_sizes(model, lambda copy: copy.twice == 80)
    assert (kept.base, kept.twice) == (2, 80)
    refused = smaller_sizes(Determined(least=10), lambda _: True)
    assert (refused.base, refused.twice) == (2, 80)
