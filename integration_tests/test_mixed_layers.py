"""Import and export of a mock family whose models have both dense layers and expert layers.

Its rows are those of the feed-forward layers of Llama and Mixtral, restricted to their layers.
"""

import json
from importlib.metadata import EntryPoint
from importlib.resources import files

import jsonschema
import megatron_ckpt.families
import pytest
import torch
from megatron_ckpt import CheckpointStore, ForeignModel, ModelRecord, export_hf
from megatron_models import GPT, GPTConfig, config_of, record_of
from megatron_models.families.family import Family
from megatron_models.families.settings import Custom, Mapped
from megatron_models.models.gpt.families import gpt2, llama, mixtral
from megatron_parallel import Mesh, collect_shardings, parameter_views
from safetensors import safe_open

SCHEMA = json.loads(files("megatron_ckpt.ops").joinpath("schema.json").read_text())


def only(rows, word):
    return tuple((*row[:3], {word: "$moe_layers"}) for row in rows)


MIXED = Family(
    name="mixed",
    kind="gpt",
    title="Mixed",
    architectures=("MixedForCausalLM",),
    model_type="mixed",
    rows=(
        *llama.START_ROWS,
        *llama.HEAD_ROWS,
        *only(llama.DENSE_ROWS, "unless"),
        *only(mixtral.EXPERT_ROWS, "if"),
    ),
    settings=mixtral.FAMILY.settings
    | {
        "ffn_hidden_size": Mapped("intermediate_size"),
        "moe_ffn_hidden_size": Mapped("moe_intermediate_size"),
        "moe_layer_freq": Mapped("moe_layer_freq"),
    },
    custom=tuple(rule for rule in mixtral.FAMILY.custom if "rotary_base" in rule.fields),
    exported_constants=mixtral.FAMILY.exported_constants,
)
CONFIG = GPTConfig(
    num_layers=5,
    hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=61,
    max_position_embeddings=16,
    ffn_hidden_size=40,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    num_experts=3,
    moe_ffn_hidden_size=20,
    moe_layer_freq="[0]+[1,0]*2",
)


@pytest.fixture
def installed(monkeypatch):
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, "mixed_family", SimpleNamespace(FAMILY=MIXED))
    entries = [
        EntryPoint(name, f"{module}:FAMILY", "megatron.families")
        for name, module in (
            ("mixed", "mixed_family"),
            ("mixtral", "megatron_models.models.gpt.families.mixtral"),
        )
    ]
    monkeypatch.setattr(megatron_ckpt.families, "entry_points", lambda group: entries)


def test_a_model_of_dense_and_expert_layers_is_imported_and_exported(installed, tmp_path):
    assert CONFIG.moe_layers == (False, True, False, True, False)
    model = GPT(CONFIG, Mesh.single(), seed=3)
    views = parameter_views(model, collect_shardings(model), model.mesh)
    record = ModelRecord(family=None, **record_of(CONFIG))  # Mixtral has experts in every layer
    path = CheckpointStore(tmp_path / "run").save(1, dict(views), model=record)
    folder = export_hf(path, tmp_path / "theirs")
    with safe_open(folder / "model.safetensors", "pt") as held:
        layers = {i: [key for key in held.keys() if f"layers.{i}." in key] for i in range(5)}  # noqa: SIM118
    assert [len(layers[i]) for i in range(5)] == [9, 6 + 1 + 3 * 3, 9, 6 + 1 + 3 * 3, 9]
    back = ForeignModel(folder)
    assert back.model.family == "mixed" and config_of(back.model) == CONFIG
    for name, parameter in model.named_parameters():
        whole = back.read_tensor(name)
        assert torch.equal(whole, parameter[: len(whole)].detach()), name


@pytest.mark.parametrize("family", [gpt2.FAMILY, llama.FAMILY, mixtral.FAMILY, MIXED])
def test_the_rows_of_families_match_the_schema(family):
    rows = json.loads(json.dumps(family.active_rows(CONFIG)))
    jsonschema.validate(rows, SCHEMA)
    assert (
        rows
        and isinstance(family.custom, tuple)
        and all(isinstance(o, Custom) for o in family.custom)
    )
