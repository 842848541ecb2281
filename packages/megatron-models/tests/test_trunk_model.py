"""What a stage derives from the arguments of a pass, and what it shares with other stages."""

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import (
    GPT,
    ConfigError,
    MambaModelConfig,
    Placement,
    StaticKVCache,
)
from megatron_models.models.decoding import DecodingPass
from megatron_models.models.gpt.model import gpt_chunks
from megatron_models.models.trunk_model import PassOptions, trunk_stage
from megatron_models.stages import StagePlan
from megatron_parallel import LayoutError, Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.context_parallel import ContextSplit

PARTS = pytest.mark.parametrize(("rank", "own"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])


def rank_of(rank, **degrees):
    """Returns the mesh of one rank, which cannot communicate."""
    layout = ParallelLayout(**degrees)
    return Mesh(layout.resolve(layout.tp * layout.pp * layout.cp), rank)


def tokens(batch, length):
    return torch.zeros(batch, length, dtype=torch.int64)


@PARTS
def test_a_rank_has_the_positions_of_its_part(small, rank, own):
    model = GPT(small(), rank_of(rank, cp=2))
    found = model.prepare(tokens(2, 4), Mask(), PassOptions())
    assert found.positions.flatten().tolist() == own and found.context_parallel is not None
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    found = model.prepare(tokens(2, 4), Mask(positions=positions), PassOptions())
    assert found.positions.tolist() == positions[:, own].tolist()
    given = tokens(2, 4) + 3
    found = model.prepare(tokens(2, 4), Mask(positions=positions), PassOptions(positions=given))
    assert found.positions is given


@PARTS
def test_a_rank_knows_the_padding_of_its_part_and_all_documents(small, rank, own):
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1], [0, 0, 0, 0, 0, 2, 2, 2]])
    experts = GPT(small(num_experts=4), rank_of(rank, cp=2))
    found = experts.prepare(tokens(2, 4), Mask(document_ids=ids), PassOptions())
    assert found.padding.tolist() == (ids[:, own] == -1).t().tolist()
    assert found.document_ids is None
    config = MambaModelConfig(
        num_layers=1,
        hidden_size=16,
        vocab_size=61,
        max_position_embeddings=32,
        mamba_num_groups=2,
        mamba_head_dim=4,
        mamba_state_dim=5,
    )
    found = GPT(config, rank_of(rank, cp=2)).prepare(
        tokens(2, 4), Mask(document_ids=ids), PassOptions()
    )
    assert found.document_ids.tolist() == ids.tolist() and found.padding is None


def test_a_row_with_positions_may_be_longer_than_sequences_on_a_chosen_axis(small):
    model = GPT(small(), rank_of(0, cp=2))  # of 16 positions
    positions, cp = torch.arange(10)[None], model.mesh.axis("cp")
    found = model.prepare(tokens(1, 10), Mask(), PassOptions(positions=positions, cp=cp))
    assert found.positions is positions
    for given in ({}, {"positions": positions}, {"cp": cp}):
        with pytest.raises(ConfigError, match="a sequence of 20 tokens is longer"):
            model.prepare(tokens(1, 10), Mask(), PassOptions(**given))


def test_a_split_is_that_of_the_ranks_and_of_the_length(small):
    model, cpu = GPT(small(), rank_of(0, cp=2)), torch.device("cpu")
    split = ContextSplit.zigzag(8, 2, cpu)
    found = model.prepare(tokens(1, 4), Mask(), PassOptions(split=split))
    assert found.positions.flatten().tolist() == split.indices[0].flatten().tolist()
    with pytest.raises(ConfigError, match=r"2 tokens on one of 2 .* into 2 parts of 4"):
        model.prepare(tokens(1, 2), Mask(), PassOptions(split=split))
    with pytest.raises(ConfigError, match=r"4 tokens on one of 2 .* into 4 parts of 4"):
        four = ContextSplit.zigzag(16, 4, cpu)
        model.prepare(tokens(1, 4), Mask(), PassOptions(split=four))


def test_decoding_cuts_no_sequence_and_recomputes_nothing(small):
    recompute = RecomputeConfig("full", "uniform", 1)
    mesh = rank_of(0, cp=2)
    model = GPT(small(), Placement(mesh, recompute=recompute))
    cache = StaticKVCache(small(), mesh, 1, 12)
    found = model.prepare(tokens(1, 5), Mask(), PassOptions(cache=cache))
    assert (found.context_parallel, found.positions, found.sequence_parallel) == (None, None, False)
    assert found.recompute == RecomputeConfig()
    found = model.prepare(tokens(1, 4), Mask(), PassOptions())
    assert (found.recompute, found.sequence_parallel) == (recompute, None)
    split = ContextSplit.zigzag(4, 2, torch.device("cpu"))
    for cut in ({"cp": mesh.axis("cp")}, {"split": split}):
        with pytest.raises(ConfigError, match="cache and split exclude each other"):
            model.prepare(tokens(1, 2), Mask(), PassOptions(cache=cache, **cut))


def test_a_recomputation_that_the_layout_does_not_divide_is_refused(small):
    recompute = RecomputeConfig("full", "uniform", 1, distribute_saved_activations=True)
    with pytest.raises(LayoutError, match="needs at least 2 tensor parallel ranks"):
        GPT(small(), Placement(Mesh.single(), recompute=recompute))


def test_a_cut_stream_is_of_more_tokens_but_not_in_decoding(small):
    config, mesh = small(), rank_of(0, tp=2)
    first = GPT(config, Placement(mesh, sequence_parallel=True))
    cache = StaticKVCache(config, mesh, 1, 12)
    with pytest.raises(ConfigError, match="of 5 tokens cannot be divided over 2"):
        first.prepare(tokens(1, 5), Mask(), PassOptions())
    assert first.prepare(tokens(1, 5), Mask(), PassOptions(cache=cache)).cache is cache
    second = GPT(config, Placement(rank_of(2, tp=2, pp=2), sequence_parallel=True))
    stream = torch.zeros(9, 1, 24)
    with pytest.raises(ConfigError, match="a sequence of 18 tokens is longer"):
        second.prepare(stream, Mask(), PassOptions())
    assert second.prepare(stream, Mask(), PassOptions(cache=cache)).cache is cache


def angles(config, mesh, length, **options):
    (found,) = (
        GPT(config, mesh).prepare(tokens(1, length), Mask(), PassOptions(**options)).angles.values()
    )
    return found[0]


def test_a_rotation_is_scaled_by_the_length_of_the_whole_sequence(small):
    rope = {"position_embedding_type": "rope", "rope_scaling_type": "dynamic"}
    config = small(**rope, rope_scaling_factor=2.0, rope_scaling_original_length=8)
    mesh = Mesh.single()
    whole, plain = angles(config, mesh, 12), angles(small(position_embedding_type="rope"), mesh, 12)
    assert not torch.equal(whole, plain)
    part = angles(config, rank_of(0, cp=2), 6)
    assert torch.equal(part.flatten(), whole[[0, 1, 2, 9, 10, 11]].flatten())
    assert torch.equal(angles(config, mesh, 8), plain[:8])
    cached = angles(config, mesh, 8, cache=StaticKVCache(config, mesh, 1, 12))
    assert torch.equal(cached, angles(config, mesh, 16)[:8])  # that of all positions


def test_outputs_of_stages_are_of_a_part_of_the_sequence(small):
    cut = GPT(small(), rank_of(0, cp=2, pp=2))
    assert cut.stage_output_spec(3, 8).shape == (4, 3, 24)
    with pytest.raises(LayoutError, match="6"):
        cut.stage_output_spec(3, 6)
    assert GPT(small(), rank_of(0, pp=2)).stage_output_spec(3, 5).shape == (5, 3, 24)


def test_further_layers_communicate_like_the_last(small):
    kinds = ("p2p", "allgather", "a2a")
    placement = Placement(rank_of(0, cp=2), cp_comm_type=kinds)
    model = GPT(small(num_layers=3, mtp_num_layers=2), placement)
    assert model.cp_comm_type == (*kinds, "a2a", "a2a")


@pytest.mark.parametrize(
    ("stage", "count", "tied", "again", "expected"),
    [
        (0, 1, True, False, (True, False, False, False)),
        (0, 1, False, True, (False, False, False, False)),
        (0, 2, False, False, (False, False, False, False)),
        (0, 2, True, False, (False, True, False, False)),
        (1, 2, True, False, (True, True, False, True)),
        (0, 2, False, True, (False, True, True, False)),
        (1, 2, False, True, (False, True, True, False)),
        (2, 3, True, True, (True, True, True, False)),
        (1, 2, False, False, None),
        (1, 3, True, True, None),
    ],
)
def test_a_stage_holds_the_embedding_that_it_reads(small, stage, count, tied, again, expected):
    plan = StagePlan(stage, count, range(1))
    found = trunk_stage(small().trunk(), plan, tied_output=tied, embeds_again=again).embedding
    if expected is None:
        assert found is None
    else:
        ties = (found.tied_over_stages, found.positions_tied_over_stages)
        assert (found.is_output_weight, *ties, found.output_only) == expected


@pytest.mark.parametrize("depths", [0, 1])
def test_the_ends_of_a_pipeline_in_a_v_hold_the_same_embedding(small, depths):
    config = small(num_layers=4, mtp_num_layers=depths)
    for rank in range(2):
        mesh = rank_of(rank, pp=2, vpp=2, stage_mapping="v")
        first, last = gpt_chunks(config, mesh)
        assert (first.stage, last.stage) == (rank, 3 - rank)
        if rank:
            assert first.embedding is last.embedding is None
            continue
        assert last.embedding.word is first.embedding.word
        assert last.embedding.position is (first.embedding.position if depths else None)
    loop = gpt_chunks(config, rank_of(1, pp=2, vpp=2))
    assert [chunk.embedding is None for chunk in loop] == [True, False]
    untied = small(num_layers=4, untie_embeddings_and_output_weights=True)
    first, last = gpt_chunks(untied, rank_of(0, pp=2, vpp=2, stage_mapping="v"))
    assert first.embedding is not None and last.embedding is None


def test_stages_decode_the_stream_of_the_one_before(small):
    config, given = small(), torch.arange(10).view(2, 5)
    stages = [GPT(config, rank_of(rank, pp=2)) for rank in range(2)]
    passes = [
        DecodingPass(given, StaticKVCache(config, stage.mesh, 2, 8, layers=[number]))
        for number, stage in enumerate(stages)
    ]
    assert [stage.first_active_stage(passes[0]) for stage in stages] == [0, 0]
    assert not GPT.reads_source
    assert [stage.input_shapes(passes[0]) for stage in stages] == [(), ((5, 2, 24),)]
    with torch.no_grad():
        stream = stages[0].decode((), passes[0])
        assert [tuple(each.shape) for each in stream] == [(5, 2, 24)]
        (found,) = stages[1].decode(stream, passes[1])
        assert torch.equal(found, GPT(config, Mesh.single())(given))


def test_passes_are_compared_by_identity():
    for kind in (lambda each: DecodingPass(each, None), lambda each: PassOptions(positions=each)):
        one, other = kind(tokens(1, 2)), kind(tokens(1, 2))
        assert one != other and len({one, other, one}) == 2
