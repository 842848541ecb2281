"""Stages of encoder-decoders by hand: their layers, inputs and shared parameters."""

from dataclasses import replace

import pytest
import torch
from megatron_models import (
    ConfigError,
    EncoderDecoder,
    EncoderDecoderConfig,
    GPTConfig,
    StaticKVCache,
    encoder_decoder_flops,
    training_memory,
)
from megatron_models.models.decoding import DecodingPass
from megatron_models.models.encoder_decoder.masks import documents, mask_of_source
from megatron_models.stages import plan_encoder_decoder_stage, plan_stage, sequence_shard_length
from megatron_parallel import Mesh, ParallelLayout, collect_shardings

CPU = torch.device("cpu")
CONFIG = EncoderDecoderConfig(
    num_layers=4,
    encoder_num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=61,
    max_position_embeddings=16,
    ffn_hidden_size=24,
)
RELATIVE = replace(CONFIG, position_embedding_type="relative")
FOUR = ParallelLayout(pp=4)


def stage_of(number, config=CONFIG, pp=4, **options):
    return EncoderDecoder(config, Mesh(ParallelLayout(pp=pp).resolve(pp), number), **options)


def layers(plan):
    """Returns the first and the last number of the layers of both sides of a plan."""
    sides = (plan.encoder, plan.decoder)
    return tuple(None if side is None else (side.layers[0], side.layers[-1]) for side in sides)


@pytest.mark.parametrize(
    ("layout", "options", "first", "expected"),
    [
        (FOUR, {}, 2, [((0, 1), None), ((2, 3), None), (None, (0, 3)), (None, (4, 7))]),
        (
            *(FOUR, {"encoder_stages": 1}, 1),
            [((0, 3), None), (None, (0, 3)), (None, (4, 7)), (None, (8, 11))],
        ),
        (
            *(FOUR, {"split": (range(3), range(3, 4), range(4, 5), range(5, 12))}, 2),
            [((0, 2), None), ((3, 3), None), (None, (0, 0)), (None, (1, 7))],
        ),
        (
            *(ParallelLayout(pp=2), {"split": (range(4), range(4, 12))}, 1),
            [((0, 3), None), (None, (0, 7))],
        ),
        (ParallelLayout(pp=3), {}, 1, [((0, 3), None), (None, (0, 3)), (None, (4, 7))]),
    ],
)
def test_the_first_stages_are_those_of_the_encoder(layout, options, first, expected):
    decoder_layers = 12 if options.get("encoder_stages") else 8
    plans = [
        plan_encoder_decoder_stage(4, decoder_layers, layout, rank, **options)
        for rank in range(layout.pp)
    ]
    assert [layers(plan) for plan in plans] == expected
    for number, plan in enumerate(plans):
        assert (plan.stage, plan.count, plan.encoder_stages) == (number, layout.pp, first)
        assert plan.embedding_stages == (0, first)
        side = plan.encoder or plan.decoder
        inside = number if plan.encoder else number - first
        count = first if plan.encoder else layout.pp - first
        assert (side.stage, side.count) == (inside, count)
        assert (side.first, side.last) == (inside == 0, inside == count - 1)


def test_chunks_of_a_rank_may_be_of_both_sides():
    layout = ParallelLayout(pp=2, vpp=2)
    plans = [plan_encoder_decoder_stage(4, 6, layout, 1, chunk) for chunk in range(2)]
    assert [plan.stage for plan in plans] == [1, 3]
    assert [layers(plan) for plan in plans] == [((2, 3), None), (None, (3, 5))]
    for chunk in (-1, 2):
        with pytest.raises(
            ConfigError, match=f"chunk {chunk} does not exist: the layout has vpp=2"
        ):
            plan_encoder_decoder_stage(4, 6, layout, 0, chunk)


def test_one_stage_holds_both_sides():
    plan = plan_encoder_decoder_stage(3, 5, ParallelLayout(), 0)
    assert layers(plan) == ((0, 2), (0, 4)) and plan.embedding_stages == (0,)
    assert (plan.stage, plan.count, plan.encoder_stages) == (0, 1, 1)
    assert plan.encoder.first and plan.encoder.last and plan.decoder.first and plan.decoder.last


def test_two_stages_divide_equal_sides():
    three = (range(2), range(2, 5), range(5, 8))
    with pytest.raises(ConfigError, match=r"stage 1 of 3 has layers 2:5, .*; use 2 or 4 stages"):
        plan_encoder_decoder_stage(4, 4, ParallelLayout(pp=3), 0, split=three)


@pytest.mark.parametrize(
    ("sides", "options", "words"),
    [
        ((4, 8), {"encoder_stages": 0}, "encoder_stages=0 of 4 stages leaves .*; use 1 to 3"),
        ((4, 8), {"encoder_stages": 4}, "encoder_stages=4 of 4 stages leaves .*; use 1 to 3"),
        ((5, 8), {}, "the encoder's 5 layers .* its 2 stages; use 4 or 6 layers or other"),
        ((4, 7), {}, "the decoder's 7 layers .* its 2 stages; use 6 or 8 layers or other"),
        (
            *((2, 4), {"split": (range(1), range(1, 3), range(3, 4), range(4, 6))}),
            r"stage 1 of 4 has layers 1:3, of the encoder \(0:2\) and of the decoder \(2:6\); "
            "use 3 or 6 stages",
        ),
        (
            *((2, 3), {"split": (range(1), range(1, 3), range(3, 4), range(4, 5))}),
            r"stage 1 of 4 has layers 1:3, of the encoder \(0:2\) and of the decoder \(2:5\); "
            "use 5 stages",
        ),
        (
            *((6, 6), {"split": (range(4), range(4, 7), range(7, 9), range(9, 12))}),
            r"stage 1 of 4 has layers 4:7, of the encoder \(0:6\) .* \(6:12\); use 4 or 6 stages",
        ),
        ((2, 4), {"split": (range(6),)}, "the split has 1 stages, but the pipeline has 4"),
        (
            *((2, 4), {"split": (range(6),), "encoder_stages": 1}),
            "split and encoder_stages exclude each other; leave one out",
        ),
    ],
)
def test_sides_that_do_not_divide_are_refused(sides, options, words):
    with pytest.raises(ConfigError, match=words):
        plan_encoder_decoder_stage(*sides, FOUR, 0, **options)


def test_stages_of_a_decoder_alone():
    config = GPTConfig(
        num_layers=6,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=9,
        max_position_embeddings=8,
    )
    plans = [plan_stage(config, ParallelLayout(pp=3), rank) for rank in range(3)]
    assert [plan.layers for plan in plans] == [range(2), range(2, 4), range(4, 6)]
    assert [plan.count for plan in plans] == [3, 3, 3]
    with pytest.raises(ConfigError, match="chunk -1 does not exist"):
        plan_stage(config, ParallelLayout(), 0, -1)


def test_lengths_of_shards():
    assert sequence_shard_length(12, 3) == 4 and sequence_shard_length(5, 1) == 5
    with pytest.raises(
        ConfigError,
        match="of 7 tokens cannot be divided over 4 sequence-parallel ranks; use 4 or 8",
    ):
        sequence_shard_length(7, 4)


def test_sides_number_their_layers_together():
    sides = CONFIG.trunks()
    assert [(len(side.layers), side.layer_offset) for side in sides.values()] == [(2, 0), (4, 2)]
    found = [[(part.name, part.site) for part in side.layers[0]] for side in sides.values()]
    assert found[0] == [("attention", 2), ("mlp", 3)]
    assert found[1] == [("attention", 2), ("cross_attention", 5), ("mlp", 3)]
    assert [side.embedding_site for side in sides.values()] == [0, 6]
    encoder, decoder = (side.layers[0][0].mixer for side in sides.values())
    assert (encoder.bidirectional, encoder.num_layers) == (True, 2)
    assert (decoder.bidirectional, decoder.num_layers) == (False, 4)
    assert CONFIG.depth == 6 and set(CONFIG.cached(1)) == {2, 3, 4, 5}
    counts = {number: len(mixers) for number, mixers in CONFIG.numbered_mixers.items()}
    assert counts == {0: 2, 1: 2, 2: 3, 3: 3, 4: 3, 5: 3}
    chosen = CONFIG.fields_for_layers([0, 2, 5])
    assert (chosen["encoder_num_layers"], chosen["num_layers"]) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_output_gate": True}, "does not support attention_output_gate; leave it out"),
        (
            {"qk_l2_norm": True, "position_embedding_type": "rope"},
            "does not support qk_l2_norm; leave it out",
        ),
        ({"qk_layernorm": True}, "does not support qk_layernorm; leave it out"),
        (
            {"position_embedding_type": "alibi"},
            "does not support position_embedding_type alibi; leave it",
        ),
        ({"softmax_type": "learnable"}, "has no attention sinks: softmax_type learnable"),
        ({"sliding_window": 4}, "has no windows: sliding_window 4, attention_chunk_size 0"),
        ({"separate_decoder_embedding": True}, "leaves open which embedding is the output matrix"),
        ({"encoder_num_layers": 100_001}, "encoder_num_layers is 100001, more than 100000"),
    ],
)
def test_options_without_an_encoder_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        replace(CONFIG, **changes)
    assert words in str(caught.value).replace("'", "")


def test_a_layout_that_cuts_sequences_is_refused():
    with pytest.raises(ConfigError, match="cp 2 cannot cut the sequences of an encoder-decoder"):
        CONFIG.check_layout(ParallelLayout(cp=2))
    with pytest.raises(ConfigError, match="does not support context parallelism: cp=2"):
        EncoderDecoder(CONFIG, Mesh(ParallelLayout(cp=2).resolve(2), 0))


def test_work_of_two_texts():
    """Keys and values of cross-attention are of the source; half of all pairs of a text count."""
    width, keys, ffn = 16, 2 * 2 * 4, 2 * 16 * 24
    encoder = 2 * ((2 * width + keys) * width + ffn)
    own = (2 * width + keys) * width + ffn
    crossing = 2 * width * width
    decoder = 4 * (own + crossing) + 16 * 128
    of_source = encoder + 4 * keys * width
    pairs = 2 * 2 * width * 5 * 5 + 4 * 2 * width * (5 * 7 + 7 * 7 / 2)
    assert encoder_decoder_flops(CONFIG, 5, 7, 3) == 6 * 3 * (of_source * 5 + decoder * 7 + pairs)


@pytest.mark.parametrize(
    ("number", "with_source", "without"),
    [(0, (), None), (1, ((5, 3, 16),), None), (2, ((5, 3, 16),), ()), (3, None, ((7, 3, 16),))],
)
def test_stages_receive_the_streams_of_both_sides(number, with_source, without):
    tokens, source = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)
    model = stage_of(number)
    first, later = (DecodingPass(tokens, None, source=each) for each in (source, None))
    assert (model.first_active_stage(first), model.first_active_stage(later)) == (0, 2)
    expected = ((7, 3, 16), (5, 3, 16)) if with_source is None else with_source
    assert model.input_shapes(first) == expected
    if without is not None:
        assert model.input_shapes(later) == without
    specs = model.stage_output_spec(0, 3, 5, 7), model.stage_output_spec(2, 3, 5, 7)
    assert [[tuple(each.shape) for each in spec] for spec in specs] == [
        [(5, 3, 16)],
        [(7, 3, 16), (5, 3, 16)],
    ]


def test_layers_of_both_sides_are_gathered_one_at_a_time():
    whole = stage_of(0, pp=1)
    both = [*whole.encoder.layers.values(), *whole.decoder.layers.values()]
    assert whole.units() == both and len(both) == 6
    for number, own in ((0, "encoder"), (3, "decoder")):
        stage = stage_of(number)
        assert stage.units() == [*getattr(stage, own).layers.values()] != []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position_embedding_type": "relative"},
        {"untie_embeddings_and_output_weights": True, "separate_decoder_embedding": True},
    ],
)
def test_the_first_stage_needs_the_memory_of_its_parameters(changes):
    config = replace(CONFIG, **changes)
    held = sum(parameter.numel() for parameter in stage_of(0, config).parameters())
    found = training_memory(config, 8, 1, layers=1, activations=False)
    assert (found.parameters, found.optimizer) == (4 * held, 8 * held)


def test_one_stage_begins_with_itself():
    later = DecodingPass(torch.zeros(3, 7, dtype=torch.long), None)
    model = stage_of(0, pp=1)
    assert model.first_active_stage(later) == 0 and model.input_shapes(later) == ()
    assert stage_of(1, pp=2).first_active_stage(later) == 1
    chunk = EncoderDecoder(CONFIG, Mesh(ParallelLayout(pp=2, vpp=2).resolve(2), 0), chunk=1)
    assert chunk.first_active_stage(later) == 2
    assert chunk.reads_source and CONFIG.predicts_tokens


@pytest.mark.parametrize(
    ("number", "given", "words"),
    [
        (0, 1, "stage 0, with 2 stages of the encoder, takes no tensor, not 1"),
        (1, 0, "takes 1 tensor of the encoder, not 0"),
        (2, 2, "takes 1 tensor of the encoder, not 2"),
        (3, 1, "takes 2 tensors, decoder's and encoder's, not 1"),
    ],
)
def test_a_stage_takes_a_number_of_tensors(number, given, words):
    text = torch.zeros(3, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match=words):
        stage_of(number)(*[torch.zeros(4, 3, 16)] * given, source=text, target=text)


@pytest.mark.parametrize(
    ("number", "given", "words"),
    [(2, 1, "takes no tensor, not 1"), (3, 0, "takes 1 tensor of the decoder, not 0")],
)
def test_a_later_pass_has_the_stream_of_the_decoder_alone(number, given, words):
    text, stage = torch.zeros(3, 4, dtype=torch.long), stage_of(number)
    cache = StaticKVCache(CONFIG, stage.mesh, 3, 8, layers=range(2 * number - 2, 2 * number))
    with pytest.raises(ConfigError, match=words):
        stage(*[torch.zeros(4, 3, 16)] * given, target=text, cache=cache)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, [{"embedding.word", "embedding.position"}, set(), {"embedding.word"} | {
            "embedding.position"}, {"embedding.word"}]),
        (
            RELATIVE,
            [{"embedding.word", "encoder.relative_bias"}, {"encoder.relative_bias"}]
            + [{"embedding.word", "decoder.relative_bias"}] * 2,
        ),
        (
            replace(CONFIG, untie_embeddings_and_output_weights=True),
            [{"embedding.word", "embedding.position"}, set()] * 2,
        ),
    ],
    ids=["tied", "relative", "untied"],
)  # fmt: skip
def test_stages_share_embeddings_and_biases(config, expected):
    for number in range(4):
        table = collect_shardings(stage_of(number, config))
        tied = {name.removesuffix(".weight") for name, each in table.items() if each.tied}
        if number == 3 and config.untie_embeddings_and_output_weights:
            assert "output.weight" in table
        assert tied == (expected[number] if number < 3 or "output.weight" not in table else set())


def test_padding_of_the_source_is_no_document():
    padding = torch.tensor([[False, False, True], [False, True, True]])
    assert documents(None) is None
    assert documents(padding).tolist() == [[0, 0, -1], [0, -1, -1]]
    for source in ((2, 3), None):
        mask = mask_of_source(padding, source, (2, 4), CPU)
        assert mask.query_document_ids.tolist() == [[0] * 4] * 2
        assert not mask.causal and mask.document_ids.tolist() == [[0, 0, -1], [0, -1, -1]]
    assert mask_of_source(None, (2, 3), (2, 4), CPU).document_ids is None
    with pytest.raises(ConfigError, match="the target has 3 sequences and the source 2"):
        mask_of_source(None, (2, 3), (3, 4), CPU)
    with pytest.raises(ConfigError, match=r"source_padding is \[2, 3\] for a source of \[2, 5\]"):
        mask_of_source(padding, (2, 5), (2, 4), CPU)
    with pytest.raises(ConfigError, match=r"source_padding is \[2, 3\] for a source of \[3, 3\]"):
        mask_of_source(padding, None, (3, 4), CPU)
