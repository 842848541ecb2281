"""Layers that differ one by one: the text of a configuration, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from megatron_models.cache import StaticKVCache
from megatron_models.components.heterogeneous.blocks import read_blocks
from megatron_models.components.mixer import KVSpec
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.model import GPT
from megatron_models.parameters import parameter_count
from megatron_models.placement import Placement
from megatron_parallel import Mesh, ParallelLayout


@pytest.fixture
def layers(small):
    """Returns a maker of configurations from blocks."""

    def make(*blocks, **changes):
        changes = {"num_layers": len(blocks)} | changes
        return small(heterogeneous_layers_config_encoded_json=json.dumps(blocks), **changes)

    return make


MIXED = (
    {"attention": {"no_op": True}, "mlp": {"ffn_hidden_size": 28}},
    {"attention": {"num_query_groups": 2}, "mlp": {"replace_with_linear": True}},
    {"attention": {"num_attention_heads": 2, "num_query_groups": 1}, "mlp": {"no_op": True}},
    {"attention": {"replace_with_linear": True}},
)


def test_each_layer_has_its_own_parameters(layers):
    """Sizes are computed by hand: width 24, 4 heads of 6 channels, 40 feed-forward channels."""
    config = layers(*MIXED)
    counts = {}
    for name, spec in config.parameters().items():
        if name.startswith("layers."):
            part = ".".join(name.split(".")[1:3])
            counts[part] = counts.get(part, 0) + spec.numel
    linear, norm = 24 * 24 + 24, 2 * 24
    assert counts == {
        "0.mlp_norm": norm,
        "0.mlp": 2 * 24 * 28 + 28 + 24,
        "1.attention_norm": norm,
        "1.attention": (24 + 2 * 12) * 25 + linear,
        "1.mlp_norm": norm,
        "1.mlp": linear,
        "2.attention_norm": norm,
        "2.attention": (12 + 2 * 6) * 25 + 24 * 12 + 24,
        "3.attention_norm": norm,
        "3.attention": linear,
        "3.mlp_norm": norm,
        "3.mlp": 2 * 24 * 40 + 40 + 24,
    }
    names = {name for name, _ in GPT(config, Mesh.single()).named_parameters()}
    assert names == set(config.parameters())


def test_a_cache_holds_what_each_layer_has(layers):
    config = layers(*MIXED)
    assert config.cached(1) == {1: KVSpec(2, 6, 6), 2: KVSpec(1, 6, 6)}
    model = GPT(config, Placement(Mesh.single(), dtype=torch.float64))
    cache = StaticKVCache(config, Mesh.single(), 2, 9, torch.float64)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        steps = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(steps), model(tokens), rtol=0, atol=1e-12)


def test_blocks_without_settings_equal_the_model_without_blocks(layers, small):
    empty = layers({}, {"attention": None, "mlp": {"ffn_hidden_size": None}})
    assert empty.trunk() == small().trunk()
    assert parameter_count(empty) == parameter_count(small())


def test_kinds_replace_the_pattern_of_experts(layers):
    experts = {"num_experts": 2, "moe_layer_freq": "[1,0,1]"}
    config = layers(
        {"mlp": {"kind": "dense", "ffn_hidden_size": 32}},
        {"mlp": {"kind": "moe", "moe_ffn_hidden_size": 16}},
        {"mlp": {"replace_with_linear": True}},
        **experts,
    )
    assert config.moe_layers == (False, True, False)
    shapes = {name: spec.sharding.shape for name, spec in config.parameters().items()}
    assert shapes["layers.0.mlp.up.weight"] == (32, 24)
    assert shapes["layers.1.mlp.experts.up.weight"] == (2, 16, 24)
    (loss_layers,) = {m.layers_with_experts for m in config.mixers if m.expert_parallel}
    assert loss_layers == 1
    with pytest.raises(ConfigError, match="no layer has experts"):
        layers({"mlp": {"kind": "dense"}}, num_experts=2)
    with pytest.raises(ConfigError, match="kind moe needs num_experts"):
        layers({"mlp": {"kind": "moe"}})


def test_units_of_nemotron_nas_are_read():
    """The first two blocks of Llama-3_3-Nemotron-Super-49B's kind; width 8192, 64 heads."""
    unused = {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False}
    blocks = [
        {
            "attention": {"n_heads_in_group": 8, "no_op": False, **unused},
            "ffn": {"ffn_mult": 5.25, "no_op": False, "replace_with_linear": False},
        },
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.3125, "sparsify": None}},
    ]
    first, second = read_blocks(json.dumps({"block_configs": blocks}), 8192, 64)
    assert first.attention.changes == {"num_query_groups": 8}
    assert first.mlp.changes == {"ffn_hidden_size": 28672}
    assert second.attention.no_op
    assert second.mlp.changes == {"ffn_hidden_size": 7168}


@pytest.mark.parametrize(
    ("factor", "hidden", "width"),
    [(1.5, 256, 256), (1.5, 257, 512), (3, 256, 512), (0.02, 100, 256), (2**20 - 1, 3, 2097152)],
)
def test_widths_are_rounded_up_to_a_multiple_of_256(factor, hidden, width):
    (found,) = read_blocks(json.dumps([{"mlp": {"ffn_mult": factor}}]), hidden, 4)
    assert found.mlp.changes == {"ffn_hidden_size": width}


@pytest.mark.parametrize("factor", [0, -0.5, 2**20, True, "4"])
def test_other_multiples_are_refused(factor):
    with pytest.raises(ConfigError, match=r"ffn_mult must be a positive number below 2\^20, not"):
        read_blocks(json.dumps([{"mlp": {"ffn_mult": factor}}]), 8, 4)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"attention": {"n_heads_in_group": 0}}, "is 0, which does not divide the heads .4.; use"),
        ({"attention": {"n_heads_in_group": 3}}, "does not divide the heads .4.; use 2 or 4"),
        (
            {"attention": {"n_heads_in_group": 2.0}},
            "is 2.0, which does not divide the heads .4.; use an integer that does",
        ),
        (
            {"attention": {"num_attention_heads": "8", "n_heads_in_group": 2}},
            "does not divide the heads .'8'.; use an integer that does",
        ),
        (
            {"attention": {"n_heads_in_group": 2, "num_query_groups": 2}},
            "n_heads_in_group and num_query_groups exclude each other; leave one out",
        ),
        (
            {"mlp": {"ffn_mult": 2, "ffn_hidden_size": 8}},
            "ffn_mult and ffn_hidden_size exclude each other; leave one out",
        ),
        ({"attention": {"kind": "moe"}}, "kind is 'moe'; kinds of mlp are dense and moe"),
        ({"attention": {"module": 3}}, "module is 3, not package.module:Class"),
        (
            {"mlp": {"module": "a:B", "kind": "moe"}},
            "kind has no effect with module; leave one out",
        ),
        ({"mlp": {"no_op": True, "kind": "moe"}}, "kind has no effect with no_op or replace_with"),
        ({"mlp": {"no_op": True, "replace_with_linear": True}}, "exclude each other"),
        ({"mlp": 3}, "layer 0, mlp is 3, not a map"),
        ({"attention": {"xyzxyz": 1}}, "unknown key 'xyzxyz'; use no_op, replace_with_linear, "),
    ],
)
def test_wrong_entries_of_a_block_are_refused(block, words):
    with pytest.raises(ConfigError, match=words):
        read_blocks(json.dumps([block]), 8, 4)


def test_groups_of_a_layer_with_other_heads():
    block = {"attention": {"num_attention_heads": 12, "n_heads_in_group": 3}}
    (found,) = read_blocks(json.dumps([block]), 8, 4)
    assert found.attention.changes == {"num_attention_heads": 12, "num_query_groups": 4}


@pytest.mark.parametrize("length", [200, 201])
def test_names_of_modules_have_200_letters(small, length):
    """A longer one is not looked for."""
    with pytest.raises(ConfigError) as caught:
        small(layer_modules="mlp=" + "a" * (length - 2) + ":B")
    assert ("is no name of a module" in str(caught.value)) == (length == 201)


@pytest.mark.parametrize(
    "text", ["norm=a:B", "mlp", "mlp=", "=a:B", "mlp=a:B,mlp=c:D", "mlp=a:B;attention=c:D,x"]
)
def test_wrong_lists_of_modules_are_refused(small, text):
    with pytest.raises(ConfigError, match=r"layer_modules is .*, not attention=package.module:Cl"):
        small(layer_modules=text)


def test_every_layer_is_checked_against_the_layout(layers):
    config = layers({}, {"attention": {"num_attention_heads": 6, "num_query_groups": 6}})
    with pytest.raises(ConfigError, match="tp 4 cannot cut num_attention_heads 6 into 4"):
        config.check_layout(ParallelLayout(tp=4, dp=1))
    config = layers({}, {"mlp": {"ffn_hidden_size": 42}})
    with pytest.raises(ConfigError, match="tp 4 cannot cut ffn_hidden_size 42 into 4"):
        config.check_layout(ParallelLayout(tp=4, dp=1))
    replaced = {"attention": {"replace_with_linear": True}, "mlp": {"replace_with_linear": True}}
    layers(replaced).check_layout(ParallelLayout(tp=5, dp=1))


def test_multi_token_layers_equal_the_last_layer(layers):
    config = layers({}, MIXED[0], mtp_num_layers=1)
    names = {name for name in config.parameters() if name.startswith("mtp.0.")}
    assert not any(".attention." in name for name in names)
    assert config.parameters()["mtp.0.layer.mlp.up.weight"].sharding.shape == (28, 24)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "not JSON"),
        ("3", "neither a list nor a map"),
        ("{}", "neither a list nor a map"),
        ("[3, {}]", "layer 0 is 3, not a map"),
        ("[{}]", "has 1 layers, but num_layers is 2"),
        ('[{"atention": {}}, {}]', "layer 0: unknown key 'atention'"),
        ('[{"mlp": {}, "ffn": {}}, {}]', "layer 0 has both mlp and ffn"),
        ('[{}, {"mlp": {"ffn_hiden_size": 8}}]', "layer 1, mlp: .* mean 'ffn_hidden_size'"),
        ('[{}, {"mlp": {"ffn_hidden_size": 8.5}}]', "layer 1, mlp: .* an integer, not 8.5"),
        ('[{}, {"mlp": {"ffn_hidden_size": -8}}]', "layer 1, mlp: .* positive number, not -8"),
        (
            '[{}, {"mlp": {"ffn_mult": -1}}]',
            "ffn_mult must be a positive .*, not -1",
        ),
        ('[{}, {"mlp": {"moe_router_topk": 1}}]', "moe_router_topk needs a layer of kind moe"),
        ('[{"mlp": {"kind": "sparse"}}, {}]', "kind is 'sparse'; kinds of mlp are dense and moe"),
        ('[{"attention": {"no_op": 1}}, {}]', "no_op must be true or false, not 1"),
        ('[{"attention": {"no_op": true, "num_query_groups": 2}}, {}]', "has no effect with no_op"),
        ('[{"attention": {"num_query_groups": 3}}, {}]', "layer 0, attention: num_attention_heads"),
        ('[{"attention": {"n_heads_in_group": 3}}, {}]', r"does not divide the heads \(4\)"),
        ('[{"attention": {"sparsify": true}}, {}]', "unknown key 'sparsify'"),
        ('[{"attention": {"no_op": true}, "mlp": {"no_op": true}}, {}]', "leave the layer out"),
        ('[{"mlp": {"module": "a.b:C", "no_op": true}}, {}]', "exclude each other"),
    ],
)
def test_wrong_blocks_are_refused(small, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        small(heterogeneous_layers_config_encoded_json=text)
    assert "\n" not in str(caught.value)


def test_a_model_is_saved_with_its_layers(layers):
    config = layers(*MIXED)
    again = GPTConfig.from_json(config.to_json())
    assert again == config
    assert again.trunk() == config.trunk()
    plain = replace(config, heterogeneous_layers_config_encoded_json="")
    assert plain.trunk() != config.trunk()
