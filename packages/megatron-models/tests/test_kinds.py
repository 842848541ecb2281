"""Kinds are found by name, and wrong names in descriptions are one-line errors."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
from megatron_models import (
    ConfigError,
    LayerPass,
    Placement,
    SavedBytes,
    config_of,
    find_kind,
    model_kinds,
    record_of,
)
from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.block import build_mixer
from megatron_models.components.mixer import Mixer
from megatron_parallel import Mesh, ParallelLayout
from refusals.cases.case import SMALL


def test_the_kinds_of_this_package_are_installed():
    assert {"gpt", "t5"} <= model_kinds().keys()
    components = find_kind("gpt").components
    assert {"Stream", "Embedding", "Rotary", "Attention", "Norm", "MLP", "MoE"} <= {*components}
    assert not any(name.endswith("Fields") for name in components)  # parts of a component


def test_a_record_of_an_encoder_decoder_from_before_t5_has_three_embeddings():
    fields = {**SMALL, "encoder_num_layers": 2}
    config = config_of(SimpleNamespace(kind="encoder_decoder", version=0, config=fields))
    assert config.kind == find_kind("encoder_decoder").name == "t5"
    assert set(config.parameters()) >= {
        "encoder.embedding.word.weight",
        "decoder.embedding.word.weight",
        "output.weight",
    }
    assert record_of(config)["version"] == 1
    assert config_of(SimpleNamespace(**record_of(config))) == config


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_a_record_of_a_newer_version_is_refused(name):
    kind, fields = find_kind(name), dict(SMALL)
    assert kind.read(fields, 1) == kind.config(**fields)
    message = f"kind '{name}' has version 2, but the installed package reads up to version 1; inst"
    with pytest.raises(ConfigError, match=message):
        kind.read(fields, 2)


def test_a_kind_that_is_not_installed_is_reported_with_a_remedy():
    message = r"no kind of model 'gtp'; did you mean 'gpt'\?; installed are .*gpt.*; install the"
    with pytest.raises(ConfigError, match=message):
        find_kind("gtp")


@pytest.mark.parametrize(
    "name", ["megatron_models.absent:Attention", "megatron_models.cache:Absent", "no name at all"]
)
def test_a_wrong_module_name_in_a_description_is_a_one_line_error(small, name):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(AttentionSpec):
        module: ClassVar[str] = name

    with pytest.raises(ConfigError) as caught:
        build_mixer(small().component(Wrong), 0, Placement(Mesh.single()))
    text = str(caught.value)
    assert text.startswith(f"Wrong.module is {name!r}, which cannot be imported: ")
    assert text.endswith("; give package.module:name") and "\n" not in text
    with pytest.raises(ConfigError, match="stages of the kind 'gpt' is "):
        replace(find_kind("gpt"), stages=name).build(small(), Mesh.single())


def test_a_mixer_without_its_counts_cannot_be_created():
    class Uncounted(Mixer):
        pass

    with pytest.raises(TypeError, match=r"activations.*input_saved_by.*parameters"):
        Uncounted()


def test_a_mixer_that_says_nothing_else_is_a_matrix_without_state_or_pairs():
    class Least(Mixer):
        def parameters(self, sequence_parallel=False):
            return {}

        def activations(self, layer_pass):
            return {}

        def input_saved_by(self, layer_pass):
            return None

    mixer, layer_pass = Least(), LayerPass(8, 3, SavedBytes(4))
    assert mixer.gathers_input and mixer.converts_input(layer_pass)
    for has in (mixer.reads_padding, mixer.recurrent, mixer.bidirectional, mixer.uses_noise):
        assert has is False
    assert (mixer.reads_source, mixer.expert_parallel, mixer.always_counts()) == (False,) * 3
    assert (mixer.heads, mixer.counters(), mixer.recompute_name, mixer.cached(1)) == (
        0,
        0,
        None,
        None,
    )
    assert (mixer.multiply_adds_per_pair(), mixer.multiply_adds_of_state()) == (0, 0)
    assert not mixer.multiply_adds_of_pairs(8, 64) and not mixer.state()
    mixer.check_layout(ParallelLayout(tp=7, cp=5, dp=1))
