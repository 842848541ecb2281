"""Settings of released files of Qwen3-Next, and the layer of multi-token prediction beside them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import cases
from families.comparison import text
from families.parity import error, our_logits, our_model, same, tensors
from megatron_ckpt import Checkpoint, CheckpointStore, ModelRecord, export_hf, import_hf
from megatron_ckpt.families import detect_family
from megatron_models import GPT, ConfigError, GPTConfig, Placement, parameter_shapes, record_of
from megatron_parallel import Mesh, collect_shardings, parameter_views

transformers = pytest.importorskip("transformers")

CASE = cases()["qwen3_next"]
RELEASED: dict[str, Any] = {  # Qwen3-Next-80B-A3B-Instruct
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(content: dict[str, Any]) -> GPTConfig:
    config = detect_family(content["architectures"]).config_from_hf(content)
    assert isinstance(config, GPTConfig)
    return config


def test_released_settings_describe_the_model_of_transformers() -> None:
    ours = read(RELEASED)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**RELEASED)
        )
    assert ours.mtp_num_layers == 1
    shapes = parameter_shapes(replace(ours, mtp_num_layers=0)).values()
    assert sum(torch.Size(shape).numel() for shape in shapes) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert [not each for each in ours.linear_layers] == [i % 4 == 3 for i in range(48)]


def test_a_depth_is_exported_and_imported_and_skipped_by_transformers(tmp_path: Path) -> None:
    content = CASE.hf_config | {"num_hidden_layers": 4, "mlp_only_layers": [0]}
    config = read(content)
    assert config.mtp_num_layers == 1
    model = GPT(config, Placement(Mesh.single())).eval()
    record = ModelRecord(family=CASE.family, **record_of(config))
    views = parameter_views(model, collect_shardings(model), model.mesh)
    store = CheckpointStore(tmp_path / "trained")
    store.save(3, dict(views), model=record)
    exported = export_hf(tmp_path / "trained", tmp_path / "exported")
    names = {name for name in tensors(exported) if name.startswith("mtp.")}
    assert {name for name in names if not name.startswith("mtp.layers.0.")} == {
        *(f"mtp.{name}.weight" for name in ("fc", "norm")),
        *(f"mtp.pre_fc_norm_{name}.weight" for name in ("embedding", "hidden")),
    }
    # The layer of a depth has the tensors of the last layer of the model.
    last = {name for name in tensors(exported) if name.startswith("model.layers.3.")}
    assert {name.removeprefix("mtp.layers.0.") for name in names if ".layers." in name} == {
        name.removeprefix("model.layers.3.") for name in last
    }
    again = Checkpoint(import_hf(exported, tmp_path / "again"))
    assert again.model is not None and read_config(again) == config
    trained = store.latest_checkpoint()
    assert trained is not None
    same(
        *({name: one.read_tensor(name) for name in one.tensors} for one in (trained, again)),
        "imported again",
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        exported, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = text(config.vocab_size)
    found = our_logits(our_model(exported), tokens)
    with torch.no_grad():
        expected = theirs.eval()(tokens, use_cache=False).logits
    assert error(found, expected) < 1e-4


def read_config(checkpoint: Checkpoint) -> GPTConfig:
    assert checkpoint.model is not None
    return GPTConfig.from_dict(checkpoint.model.config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"] * 5}, "have no linear attention"),
        ({"layer_types": ["linear_attention"] * 4}, "give 'linear_attention' or 'full_attention'"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval = 0"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
    ],
)
def test_unsupported_layers_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(CASE.hf_config | changes)


def test_models_that_the_family_lacks_are_not_exported() -> None:
    family = detect_family(["Qwen3NextForCausalLM"])
    config = read(CASE.hf_config | {"num_hidden_layers": 4})
    for changes, words in (
        ({"mtp_num_layers": 2}, "mtp_num_layers = 0 or 1, this one has 2"),
        ({"linear_attention_freq": "[0,0,1,1]"}, "mtp_num_layers = 0, this one has 1"),
        ({"attention_output_gate": False}, "attention_output_gate = True"),
    ):
        with pytest.raises(ConfigError, match=words):
            family.config_to_hf(replace(config, **changes))
