"""Values that hold for all files of a family: fixed fields, neutral ones, and skipped tensors."""

from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points

import pytest
import torch
from megatron_models import model_kinds
from megatron_models.families.family import Family
from megatron_models.families.settings import REQUIRED, Unused, default_of
from megatron_models.models.trunk_model import PassOptions

FAMILIES = {
    entry.name: entry.load()
    for entry in entry_points(group="megatron.families")
    if entry.value.startswith("megatron_models.")
}
BERT = {"tie_word_embeddings": [True]}
NEUTRAL = {
    "bert": BERT,
    "minilm": BERT,
    "roberta": BERT,
    "t5": {"is_encoder_decoder": [True]},
    "gpt2": {"scale_attn_weights": [True]},
    "gpt_oss": {"swiglu_alpha": [1.702]},  # the factor of the approximate GELU
    "mamba2": {"rms_norm": [True]},
    "mixtral": {
        "norm_topk_prob": [True],
        "routed_scaling_factor": [1, 1.0],
        **{key: [0] for key in ("n_shared_experts", "num_shared_experts", "first_k_dense_replace")},
    },
    "nemotron_h": {
        "num_nextn_predict_layers": [0],
        "attention_head_dim": [128],
        **{key: [1e-5] for key in ("norm_eps", "rms_norm_eps")},
    },
    "qwen3": {"use_qk_norm": [True]},
    "qwen3_moe": {"use_qk_norm": [True], "shared_expert_intermediate_size": [0]},
}
"""Values other than switches that are off and counts of 1."""
FIXED = {
    "t5": {"is_encoder_decoder": True},
    "nemotron_h": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_neutral_fields_of_a_family_are_switches_that_are_off_or_counts_of_1(name):
    for key, values in FAMILIES[name].neutral.items():
        found = [value for value in values if type(value) in (bool, int, float)]
        usual = [{bool: False, int: 1}.get(type(value)) for value in found]
        expected = NEUTRAL.get(name, {}).get(key, usual)
        assert [(type(v), v) for v in found] == [(type(v), v) for v in expected], key


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_model_has_no_dropout(name):
    constants = dict(FAMILIES[name].exported_constants)
    rates = {key: constants.pop(key) for key in [*constants] if "drop" in key}
    assert set(rates.values()) == (set() if name == "mamba2" else {0.0})
    assert constants == FIXED.get(name, {})


def test_files_of_older_families_may_hold_frequencies_and_those_of_tied_ones_a_copy():
    skipped = {name: [kind for _, kind, _ in family.ignored] for name, family in FAMILIES.items()}
    older = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "granite", "gemma2", "glm4"}
    older |= {"olmo2", "smollm3", "gpt_neox", "falcon"}
    assert {name for name, kinds in skipped.items() if "rotary_frequencies" in kinds} == older
    copies = {name for name, kinds in skipped.items() if "same_as" in kinds}
    without = {"minilm", "nemotron_h", "deepseek_v2", "deepseek_v3", "deepseek_v32"}
    assert copies == FAMILIES.keys() - without


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_a_mask_value_in_low_precision_is_read(name):
    bound = {kind: arguments for _, kind, arguments in FAMILIES[name].ignored}["at_most"]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert float(torch.tensor(-1e4, dtype=dtype)) <= bound["value"] < -1e3


def test_an_exported_model_has_the_first_of_several_classes():
    t5 = FAMILIES["t5"]
    assert t5.config_to_hf(t5.config_from_hf({}))["architectures"] == [t5.architectures[0]]


def test_an_unused_field_is_read_from_its_source():
    given = {"theirs": 3, "null": None}
    assert Unused("theirs").read("T", "ours", given) == {"ours": 3}
    assert Unused("null").read("T", "ours", given) == Unused().read("T", "ours", given) == {}
    assert (Unused("theirs").hf_fields, Unused().hf_fields) == (("theirs",), ())


@dataclass
class Fields:
    given: int
    plain: int = 3
    made: list = field(default_factory=list)


def test_a_field_has_its_default_a_new_one_or_none():
    assert [default_of(each) for each in fields(Fields)] == [REQUIRED, 3, []]


def test_values_of_families_and_configurations_are_given_by_name():
    classes = [Family, PassOptions, *(kind.config for kind in model_kinds().values())]
    assert all(each.kw_only for one in classes for each in fields(one))
