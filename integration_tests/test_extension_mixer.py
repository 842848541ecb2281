"""A mixer of another distribution replaces a sublayer of GPT models, named in the configuration."""

import json

import pytest
import torch
from megatron_models import (
    GPT,
    GPTConfig,
    Placement,
    StaticKVCache,
    parameter_count,
    training_flops,
)
from megatron_models.errors import ConfigError
from megatron_parallel import Mesh, ParallelLayout

pytest.importorskip("bidirectional", reason="pip install -e integration_tests/stranger")

LOW_RANK = "bidirectional.low_rank:LowRankSpec"
SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 60,
    "max_position_embeddings": 12,
    "ffn_hidden_size": 24,
}
EVERY = GPTConfig(**SIZES, layer_modules=f"mlp={LOW_RANK}")
ONE = GPTConfig(
    **SIZES,
    heterogeneous_layers_config_encoded_json=json.dumps(
        [{}, {"mlp": {"module": LOW_RANK, "rank": 4}}]
    ),
)


def tokens():
    return torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(2))


def build(config, mesh, sequence_parallel=False):
    return GPT(config, Placement(mesh, torch.float64, sequence_parallel=sequence_parallel))


def losses(mesh, config, sequence_parallel):
    model = build(config, mesh, sequence_parallel)
    loss = model.loss(tokens(), tokens())
    loss.mean().backward()
    down = model.layers["1"].mlp.down.weight
    return loss.detach(), down.grad


@pytest.mark.parametrize("config", [EVERY, ONE], ids=["every layer", "one layer"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2, sp"])
def test_ranks_equal_one_rank_in_float64(worker_pool, config, sequence_parallel):
    expected, gradient = losses(Mesh.single(), config, False)
    ranks = worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), losses, config, sequence_parallel)
    for found, _ in ranks:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    found = torch.cat([each for _, each in ranks])
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)


def test_the_sublayer_computes_what_the_other_mixer_does():
    model = build(EVERY, Mesh.single())
    mlp, caught = model.layers["0"].mlp, []
    mlp.register_forward_hook(lambda module, given, output: caught.append((given[0], output)))
    with torch.no_grad():
        mlp.up.bias.copy_(torch.arange(16) / 16)
        model(tokens())
    ((given, output),) = caught
    whole = given @ (mlp.up.weight @ mlp.down.weight).T + torch.arange(16) / 16
    torch.testing.assert_close(output, whole, rtol=0, atol=1e-12)


def test_parameters_and_flops_are_those_of_the_mixer():
    plain = GPTConfig(**SIZES)
    dense, low = 2 * 16 * 24 + 24 + 16, 2 * 16 * 8 + 16
    assert parameter_count(plain) - parameter_count(EVERY) == 2 * (dense - low)
    saved = training_flops(plain, 8) - training_flops(EVERY, 8)
    assert saved == 2 * 6 * 8 * (2 * 16 * 24 - 2 * 16 * 8)
    assert parameter_count(plain) - parameter_count(ONE) == dense - (2 * 16 * 4 + 16)


def test_cached_generation_equals_a_forward_pass():
    model = build(ONE, Mesh.single())
    cache = StaticKVCache(ONE, Mesh.single(), 2, 8, torch.float64)
    with torch.no_grad():
        steps = [model(tokens()[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 8))]
        torch.testing.assert_close(torch.cat(steps), model(tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("mlp=bidirectional.low_rank:Nothing", "layer 0, mlp: the module is .* cannot be imported"),
        ("mlp=bidirectional.low_rank_module:LowRank", "name the description, not the module"),
        ("ffn=bidirectional.low_rank:LowRankSpec", "layer_modules is 'ffn=.*', not attention="),
        ("mlp", "layer_modules is 'mlp', not attention="),
    ],
)
def test_a_class_that_is_no_description_is_refused(modules, words):
    with pytest.raises(ConfigError, match=words):
        GPTConfig(**SIZES, layer_modules=modules)


def test_layouts_and_fields_that_the_mixer_does_not_have_are_refused():
    text = json.dumps([{}, {"mlp": {"module": LOW_RANK, "rank": 6}}])
    config = GPTConfig(**SIZES, heterogeneous_layers_config_encoded_json=text)
    with pytest.raises(ConfigError, match="tp 4 cannot cut rank 6 into 4 equal parts"):
        config.check_layout(ParallelLayout(tp=4, dp=1))
    text = json.dumps([{}, {"mlp": {"module": LOW_RANK, "rnak": 4}}])
    with pytest.raises(ConfigError, match=r"layer 1, mlp: LowRankSpec has no field 'rnak'.* rank"):
        GPTConfig(**SIZES, heterogeneous_layers_config_encoded_json=text)


def test_attention_that_caches_nothing_cannot_decode():
    config = GPTConfig(**SIZES, layer_modules="attention=bidirectional.config:BidirectionalSpec")
    with pytest.raises(ConfigError, match="layer 0 cannot decode with a cache: its attention"):
        StaticKVCache(config, Mesh.single(), 2, 8)
