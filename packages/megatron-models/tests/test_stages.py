from dataclasses import replace

import pytest
import torch
from megatron_models.cache import StaticKVCache
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.model import GPT, gpt_chunks
from megatron_models.placement import Placement
from megatron_models.stages import plan_stage
from megatron_parallel import (
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    TensorSpec,
    collect_shardings,
)
from megatron_parallel.sharding import ZEROS


def rank_of(rank, **degrees):
    """Returns the mesh of one rank, which cannot communicate."""
    layout = ParallelLayout(**degrees)
    return Mesh(layout.resolve(layout.tp * layout.pp), rank)


def draw(config, *shape, seed=1):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def test_stages_have_equally_many_layers_without_a_split(small):
    config = small(num_layers=8)
    layout = ParallelLayout(pp=2, vpp=2)
    plans = [plan_stage(config, layout, rank, chunk) for chunk in (0, 1) for rank in (0, 1)]
    assert [plan.layers for plan in plans] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [plan.stage for plan in plans] == [0, 1, 2, 3]
    assert [plan.first for plan in plans] == [True, False, False, False]
    assert [plan.last for plan in plans] == [False, False, False, True]
    uneven = (range(3), range(3, 4), range(4, 4), range(4, 8))
    assert plan_stage(config, layout, 1, 1, uneven).layers == range(4, 8)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((range(4),), "1 stages, but the pipeline has 2"),
        ((range(3), range(2, 4)), "0:3, 2:4 do not cover layers 0:4"),
        ((range(1), range(2, 4)), "0:1, 2:4 do not cover layers 0:4"),
        ((range(2), range(2, 3)), "0:2, 2:3 do not cover layers 0:4"),
        ((range(2, 4), range(2)), "2:4, 0:2 do not cover layers 0:4"),
    ],
)
def test_a_split_that_does_not_cover_every_layer_once_is_refused(small, split, message):
    with pytest.raises(ConfigError, match=message):
        plan_stage(small(num_layers=4), ParallelLayout(pp=2), 0, 0, split)


def test_indivisible_layers_and_missing_chunks_are_refused(small):
    with pytest.raises(LayoutError, match="5 layers cannot be split evenly over 2 stages"):
        GPT(small(num_layers=5), rank_of(0, pp=2))
    with pytest.raises(ConfigError, match="chunk 1 does not exist: the layout has vpp=1"):
        GPT(small(num_layers=4), rank_of(0, pp=2), chunk=1)


def test_stages_together_are_the_whole_model_with_its_names_and_initial_weights(config):
    whole = dict(GPT(config, Mesh.single()).named_parameters())
    found = {}
    for rank in range(2):
        stage = GPT(config, rank_of(rank, pp=2))
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole[name]), name
            found.setdefault(name, []).append(rank)
    assert found.keys() == whole.keys()
    shared = {name for name, ranks in found.items() if len(ranks) > 1}
    tied = not config.untie_embeddings_and_output_weights
    assert shared == ({"embedding.word.weight"} if tied else set())


def test_only_a_weight_that_two_stages_hold_is_tied_over_stages(small):
    def tied(config, mesh):
        table = collect_shardings(GPT(config, mesh))
        return [name for name, sharding in table.items() if sharding.tied]

    untied = small(untie_embeddings_and_output_weights=True, num_layers=3)
    for rank, expected in enumerate((["embedding.word.weight"], [], ["embedding.word.weight"])):
        assert tied(small(num_layers=3), rank_of(rank, pp=3)) == expected
        assert tied(untied, rank_of(rank, pp=3)) == []
    assert tied(small(), Mesh.single()) == []


def test_gradients_are_partial_where_the_sequence_is_cut(config):
    mesh = rank_of(0, tp=1, pp=1)
    cut = collect_shardings(GPT(config, Placement(mesh, sequence_parallel=True)))
    kinds = (
        *("position.weight", "out.bias", "down.bias", "kv_down.weight", "q_down.weight"),
        *("linear.weight", "linear.bias"),
    )

    def of_heads(name):  # each rank has some of the heads, with or without a cut sequence
        if ".attention.norm." in name:  # of a gated delta net
            return True
        norms = (".attention.q_norm.", ".attention.k_norm.")
        return not config.multi_latent_attention and any(norm in name for norm in norms)

    for name, sharding in cut.items():
        partial = name.endswith(kinds) or "_norm" in name or of_heads(name)
        assert sharding.partial == ("tp" if partial else None), name
    whole = collect_shardings(GPT(config, mesh))
    for name, sharding in whole.items():
        assert sharding.partial == ("tp" if of_heads(name) else None), name


def test_stages_in_sequence_return_the_logits_and_losses_of_the_whole_model(config, scramble):
    """Weights are copied, since scrambled weights differ between stages."""
    model = scramble(GPT(config, Placement(Mesh.single(), dtype=torch.float64)))
    stages = [GPT(config, Placement(rank_of(rank, pp=2), dtype=torch.float64)) for rank in range(2)]
    for stage in stages:
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
    tokens, labels = draw(config, 2, 6), draw(config, 2, 6, seed=2)
    x = stages[0](tokens, labels=labels)
    assert TensorSpec(tuple(x.shape), x.dtype) == stages[0].stage_output_spec(2, 6)
    assert torch.equal(stages[1](x), model(tokens))
    assert torch.equal(stages[1](x, labels=labels), model.loss(tokens, labels))


def test_stages_decode_with_caches_of_their_own_layers(config, scramble):
    model = scramble(GPT(config, Placement(Mesh.single(), dtype=torch.float64)))
    stages = [GPT(config, Placement(rank_of(rank, pp=2), dtype=torch.float64)) for rank in range(2)]
    caches = []
    for stage in stages:
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
        layers = map(int, stage.layers)
        options = {"dtype": torch.float64, "layers": layers}
        if not any(int(number) in config.cached(1) for number in stage.layers):
            with pytest.raises(ConfigError, match=r"layer \d caches nothing; use layers of \["):
                StaticKVCache(config, stage.mesh, 2, 12, **options)
            return
        caches.append(StaticKVCache(config, stage.mesh, 2, 12, **options))
    tokens = draw(config, 2, 12)
    steps = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            x = stages[0](tokens[:, start:stop], cache=caches[0])
            steps.append(stages[1](x, cache=caches[1]))
    torch.testing.assert_close(torch.cat(steps), model(tokens), rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="at least one layer"):
        StaticKVCache(config, Mesh.single(), 2, 12, layers=[])


def test_chunks_are_the_stages_of_one_rank(small):
    config = small(num_layers=4)
    chunks = gpt_chunks(config, Placement(rank_of(1, pp=2, vpp=2), sequence_parallel=True))
    assert [list(chunk.layers) for chunk in chunks] == [["1"], ["3"]]
    assert [chunk.stage for chunk in chunks] == [1, 3]
    assert [(chunk.first, chunk.last) for chunk in chunks] == [(False, False), (False, True)]
    assert all(chunk.sequence_parallel for chunk in chunks)


def test_layers_and_depths_are_gathered_one_at_a_time(small):
    model = GPT(small(num_layers=3, mtp_num_layers=1), Mesh.single())
    assert model.units() == [*model.layers.values(), *model.mtp] and len(model.units()) == 4
    first = GPT(small(mtp_num_layers=1), rank_of(0, pp=2))
    assert first.units() == [first.layers["0"]]


def test_stage_outputs_are_cut_by_sequence_parallelism(small):
    mesh = rank_of(0, tp=2, pp=2)
    whole = GPT(small(), Placement(mesh, dtype=torch.bfloat16))
    assert whole.stage_output_spec(3, 10) == TensorSpec((10, 3, 24), torch.bfloat16)
    cut = GPT(small(), Placement(mesh, sequence_parallel=True))
    assert cut.stage_output_spec(3, 10) == TensorSpec((5, 3, 24), torch.float32)


def test_placements_are_compared_by_identity():
    placement = Placement(Mesh.single())
    assert replace(placement) != placement and len({placement, placement}) == 1


def test_layers_communicate_in_slices_on_request_alone(small):
    placement = Placement(rank_of(0, tp=2), sequence_parallel=True)
    assert GPT(small(), placement).num_slices == 1
    sliced = GPT(small(), replace(placement, tp_comm_overlap=True))
    assert sliced.layers["1"].mlp.up.num_slices == sliced.num_slices > 1


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_state_of_a_module_is_at_least_float32(dtype, exact):
    placement, module = Placement(Mesh.single(), dtype=dtype), torch.nn.Module()
    table = {"inner.mean": Sharding((3,), reduce="sum", init=ZEROS)}
    assert placement.register_state(module, table, "mean", torch.add) is None
    assert not vars(module).get("sharding")
    state = placement.register_state(module, table, "inner.mean", torch.add)
    assert state.value is module.mean and module.mean.dtype == exact
    assert module.sharding == {"mean": table["inner.mean"]}


def test_a_stage_refuses_wrong_inputs(small):
    first, last = (GPT(small(), rank_of(rank, pp=2)) for rank in range(2))
    tokens = draw(small(), 2, 6)
    with pytest.raises(ConfigError, match=r"stage 1 takes activations .* torch.int64 \[2, 6\]"):
        last(tokens)
    with pytest.raises(ConfigError, match=r"stage 0 takes tokens \[b, s\], not torch.float32"):
        first(torch.zeros(6, 2, 24))
    with pytest.raises(ConfigError, match="stage 0 is not a whole model"):
        first.loss(tokens, tokens)
    with pytest.raises(ConfigError, match=r"17 tokens .* 16"):
        last(torch.zeros(17, 2, 24))
