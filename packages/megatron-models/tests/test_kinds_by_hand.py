"""Layers of each kind of model by hand: names, places of dropout, stages, and refusals."""

import pytest
from megatron_models import (
    BertConfig,
    ConfigError,
    GPTConfig,
    HybridConfig,
    MambaModelConfig,
    find_kind,
)
from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.gated_delta_net.spec import GatedDeltaNetSpec
from megatron_models.components.latent_attention.spec import LatentAttentionSpec
from megatron_models.components.mamba.spec import MambaSpec
from megatron_models.components.mlp.spec import MLPSpec
from megatron_models.components.moe.spec import MoESpec
from megatron_models.components.sparse_attention.spec import SparseAttentionSpec
from megatron_models.flops import tokens_per_pair, training_flops
from megatron_models.models.hybrid.pattern import SYMBOLS, read_pattern
from megatron_parallel import ParallelLayout

SIZES = {"hidden_size": 16, "vocab_size": 61, "max_position_embeddings": 32}
HEADS = {"num_attention_heads": 4}
MAMBA = {"mamba_num_groups": 2, "mamba_head_dim": 4, "mamba_state_dim": 5}
DELTA = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def hybrid(pattern, **changes):
    return HybridConfig(**{**SIZES, **HEADS, "hybrid_layer_pattern": pattern, **changes})


@pytest.mark.parametrize(
    ("text", "layers", "stages"),
    [
        ("M", "M", None),
        ("M*-E", "M*-E", None),
        ("M|*", "M*", [(0, 1), (1, 2)]),
        ("MM*|-|GDE", "MM*-GDE", [(0, 3), (3, 4), (4, 7)]),
    ],
)
def test_a_pattern_is_read(text, layers, stages):
    found = read_pattern(text)
    assert found.layers == layers
    assert found.stages == (None if stages is None else tuple(range(*each) for each in stages))


@pytest.mark.parametrize("text", ["", "|", "|M", "M|", "M||M"])
def test_a_stage_without_layers_is_refused(text):
    with pytest.raises(ConfigError, match="has a pipeline stage without layers; put layers around"):
        read_pattern(text)


def test_a_pattern_has_known_symbols_and_at_most_100000():
    assert len(read_pattern("M" * 100_000).layers) == 100_000
    with pytest.raises(ConfigError, match="has 100001 symbols; use at most 100000"):
        read_pattern("M" * 100_001)
    with pytest.raises(ConfigError, match=r"has the unknown symbol 'm'; use M \(Mamba-2\), G \(a "):
        read_pattern("Mm")
    assert list(SYMBOLS) == ["M", "G", "*", "D", "-", "E"]


def test_each_symbol_has_its_layer():
    """Mixers of sequences are dropped at site 2, those of single tokens at site 3."""
    config = hybrid("M*-EME*G-", num_experts=4, **MAMBA, **DELTA)
    layers = config.trunk().layers
    found = [(part.name, type(part.mixer), part.site) for (part,) in layers.values()]
    mamba, attention = ("mamba", MambaSpec, 2), ("attention", AttentionSpec, 2)
    dense, experts = ("mlp", MLPSpec, 3), ("mlp", MoESpec, 3)
    delta = ("attention", GatedDeltaNetSpec, 2)
    expected = [mamba, attention, dense, experts, mamba, experts, attention, delta, dense]
    assert found == expected
    assert layers[0] is layers[4] and layers[2] is layers[8] and layers[0] is not layers[1]
    assert [part.mixer.layers_with_experts for (part,) in (layers[3], layers[5])] == [2, 2]
    assert config.num_layers == 9 and config.has_mamba
    places = {
        "mamba_layers": {0, 4},
        "mamba_conv_bias_layers": {0, 4},
        "mamba_proj_bias_layers": set(),
        "attention_layers": {1, 6},
        "dense_layers": {2, 8},
        "moe_layers": {3, 5},
        "feed_forward_layers": {2, 3, 5, 8},
    }
    for name, numbers in places.items():
        assert getattr(config, name) == tuple(number in numbers for number in range(9)), name


def test_biases_of_recurrent_layers_are_listed():
    config = hybrid("*M", mamba_conv_bias=False, mamba_proj_bias=True, **MAMBA)
    assert config.mamba_conv_bias_layers == (False, False)
    assert config.mamba_proj_bias_layers == (False, True)
    assert not hybrid("*-").has_mamba


def test_attention_of_a_pattern_may_be_latent_and_sparse():
    latent = {"multi_latent_attention": True, "position_embedding_type": "rope", "q_lora_rank": 8}
    sizes = {"kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4}
    index = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 3}
    config = hybrid("*D", **latent, **sizes, **index, normalization="RMSNorm")
    kinds = [type(part.mixer) for (part,) in config.trunk().layers.values()]
    assert kinds == [LatentAttentionSpec, SparseAttentionSpec]


@pytest.mark.parametrize(
    ("pattern", "changes", "words"),
    [
        ("*-", {"num_layers": 3}, "has 2 layers, but num_layers is 3; use num_layers 2 or leave"),
        ("*E", {}, "has a layer E, but num_experts is 0; use num_experts of at least 1"),
        ("*-", {"num_experts": 4}, "has no layer E, but num_experts is 4; use num_experts 0"),
        ("*-", {"mamba_state_dim": 64}, "mamba_state_dim 64 has no effect without a layer M in"),
        ("*-", {"linear_conv_kernel_dim": 3}, "has no effect without a layer G in"),
        ("*-", {"dsa_indexer_topk": 3}, "dsa_indexer_topk 3 has no effect without a layer D in"),
        ("*E", {"num_experts": 4, "moe_layer_freq": "2"}, "moe_layer_freq 2 has no effect with"),
        ("*x", {}, "hybrid_layer_pattern has the unknown symbol 'x'"),
    ],
)
def test_fields_that_do_not_fit_a_pattern_are_refused(pattern, changes, words):
    with pytest.raises(ConfigError) as caught:
        hybrid(pattern, **changes)
    assert words in str(caught.value)


def test_stages_of_a_pattern_are_those_of_the_layout_and_no_part_of_the_model():
    config = hybrid("*-*|-")
    assert config.stage_split(ParallelLayout(pp=2)) == (range(3), range(3, 4))
    assert config.to_dict()["hybrid_layer_pattern"] == "*-*-"
    assert hybrid("*-*-").stage_split(ParallelLayout(pp=3)) is None
    four = hybrid("*|-|*|-")
    assert len(four.stage_split(ParallelLayout(pp=2, vpp=2))) == 4
    for layout in (ParallelLayout(), ParallelLayout(pp=4), ParallelLayout(pp=2, vpp=2)):
        count = layout.pp * layout.vpp
        words = f"has 2 pipeline stages, but the layout has {count}; use {count - 1} times | or"
        with pytest.raises(ConfigError) as caught:
            config.check_layout(layout)
        assert words in str(caught.value)


def test_layers_of_a_pattern_are_chosen():
    config = hybrid("M*|-E", num_experts=4, **MAMBA)
    fields = config.fields_for_layers([0, 3])
    assert (fields["hybrid_layer_pattern"], fields["moe_layer_freq"]) == ("ME", "1")


@pytest.mark.parametrize("kind", ["rope", "alibi", "mrope", "relative"])
def test_positions_of_attention_are_refused_without_attention(kind):
    with pytest.raises(ConfigError, match=f"position_embedding_type '?{kind}"):
        MambaModelConfig(**SIZES, num_layers=1, **MAMBA, position_embedding_type=kind)


def test_layers_of_mamba_have_one_mixer():
    config = MambaModelConfig(**SIZES, num_layers=3, **MAMBA, position_embedding_type="sinusoidal")
    layers = config.trunk().layers
    assert [[(part.name, part.site) for part in layer] for layer in layers.values()] == [
        [("mamba", 2)]
    ] * 3
    assert tokens_per_pair(config) == 0


def test_an_encoder_has_positions_after_its_offset():
    fields = {**SIZES, **HEADS, "num_layers": 1, "add_bias_linear": False}
    config = BertConfig(**fields, position_offset=31)
    assert config.longest_sequence == 1
    with pytest.raises(
        ConfigError, match="of max_position_embeddings 32; use position_offset 31 or less"
    ):
        BertConfig(**fields, position_offset=32)
    with pytest.raises(ConfigError, match="bert_pooler has no effect with a binary head"):
        BertConfig(**fields, bert_pooler=True)
    with pytest.raises(ConfigError, match="num_tokentypes is 1000001, more than 1000000"):
        BertConfig(**fields, num_tokentypes=1_000_001)
    for name in ("num_tokentypes", "position_offset"):
        with pytest.raises(ConfigError, match=f"{name} must .*, not -1"):
            BertConfig(**fields, **{name: -1})
    with pytest.raises(ConfigError, match="position_offset 2 needs position_embedding_type"):
        BertConfig(**fields, position_embedding_type="rope", position_offset=2)


@pytest.mark.parametrize(
    ("changes", "pooler", "binary", "task", "outputs"),
    [
        ({}, True, True, False, 2),
        ({"bert_binary_head": False}, False, False, False, None),
        ({"bert_binary_head": False, "bert_pooler": True}, True, False, False, 0),
        ({"task_head": "classification", "num_labels": 5}, True, False, True, 5),
        ({"task_head": "embedding"}, False, False, False, 0),
    ],
)
def test_an_encoder_has_the_head_of_its_fields(changes, pooler, binary, task, outputs):
    config = BertConfig(**{**SIZES, **HEADS, "num_layers": 1, **changes})
    head = config.head_of_sequences
    found = (config.has_sequence_pooler, config.has_binary_head, config.has_task_output)
    assert found == (pooler, binary, task)
    assert (None if head is None else head.outputs) == outputs
    assert config.predicts_tokens == ("task_head" not in changes)


def test_work_of_a_pooler_is_counted_for_each_sequence():
    """Of 20 tokens in sequences of 8 there are three sequences, the last with four tokens."""
    fields = {**SIZES, **HEADS, "num_layers": 1}
    plain, pooled = (
        BertConfig(**fields, bert_binary_head=False, bert_pooler=pooler) for pooler in (False, True)
    )
    assert pooled.multiply_adds.per_sequence == 16 * 16
    for tokens, sequences in ((8, 1), (20, 3), (24, 3), (25, 4)):
        more = training_flops(pooled, 8, tokens) - training_flops(plain, 8, tokens)
        assert more == 3 * 2 * 16 * 16 * sequences
    assert training_flops(pooled, 0) == 0


def test_a_pair_costs_a_part_of_the_other_work():
    """Two products of 16 channels for a pair; 12 matrices of 16 x 16 and the output for a token."""
    config = GPTConfig(**SIZES, **HEADS, num_layers=3)
    assert config.multiply_adds == (3 * 12 * 16 * 16 + 16 * 128, 3 * 2 * 16, 0)
    assert tokens_per_pair(config) == 96 / 11264


@pytest.mark.parametrize(
    ("layers", "expected", "kind"), [("[1,0,1]", 2 + 2, MoESpec), ("[1,1,0]", 2, MLPSpec)]
)
def test_depths_have_the_last_layer_and_the_embedding_of_the_model(layers, expected, kind):
    config = GPTConfig(
        **SIZES, **HEADS, num_layers=3, num_experts=4, moe_layer_freq=layers, mtp_num_layers=2
    )
    experts = [mixer for mixer in config.mixers if isinstance(mixer, MoESpec)]
    assert {mixer.layers_with_experts for mixer in experts} == {expected}
    for depth in config.multi_token():
        assert isinstance(depth.trunk.mixers[1], kind)
    assert config.embedding.output_passes == 3


@pytest.mark.parametrize(
    ("name", "config", "task"),
    [
        ("gpt", GPTConfig, "gpt"),
        ("hybrid", HybridConfig, "gpt"),
        ("mamba", MambaModelConfig, "gpt"),
        ("bert", BertConfig, "bert"),
    ],
)
def test_a_kind_has_its_configuration_and_task(name, config, task):
    kind = find_kind(name)
    assert (kind.name, kind.config, kind.default_task) == (name, config, task)
    assert kind.supports_decoding == (name != "bert")
