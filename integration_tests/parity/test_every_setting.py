"""Each changed field of transformers' configurations gives equal logits or an error.

The reference is transformers' model with the changed configuration and random weights in float32.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ckpt import CheckpointError, ForeignModel
from megatron_ckpt.families import find_family
from megatron_models import GPT, ConfigError, GPTConfig
from megatron_parallel import Mesh, collect_shardings, parameter_views

transformers = pytest.importorskip("transformers")

GPT2 = {"n_layer": 1, "n_embd": 24, "n_head": 4, "n_positions": 16, "vocab_size": 61, "n_inner": 40}
LLAMA = {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}
MIXTRAL = LLAMA | {"head_dim": 6, "num_local_experts": 4, "experts_implementation": "eager"}
EAGER = {"attn_implementation": "eager"}  # which can return attentions
SMALL = {"GPT2": GPT2, "Llama": LLAMA, "Mixtral": MIXTRAL}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
ROPE: tuple[Any, ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    *({**LLAMA3, key: 2 * value} for key, value in LLAMA3.items() if key != "rope_type"),
)

#: Other values of fields whose value does not determine them, or must fit other fields.
OTHERS: dict[str, tuple[Any, ...]] = {
    "architectures": (["LlamaForSequenceClassification"],),
    "dtype": ("float16",),
    "torch_dtype": ("bfloat16",),
    "transformers_version": ("4.40.0",),
    "problem_type": ("regression",),
    "id2label": ({"0": "A", "1": "B", "2": "C"},),
    "label2id": ({"A": 0, "B": 1, "C": 2},),
    "_name_or_path": ("elsewhere",),
    "model_type": ("mistral",),
    "vocab_size": (50, 70),
    "n_embd": (32,),
    "hidden_size": (32,),
    "n_head": (2, 6),
    "num_attention_heads": (2, 6),
    "num_key_value_heads": (1, 4),
    "n_inner": (None, 56),
    "n_positions": (12, 20),
    "max_position_embeddings": (12, 20),
    "activation_function": ("gelu", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu"),
    "hidden_act": ("gelu", "swish", "relu"),
    "head_dim": (4, 10),
    "resid_pdrop": (0.5,),
    "embd_pdrop": (0.5,),
    "attn_pdrop": (0.5,),
    "attention_dropout": (0.5,),
    "router_jitter_noise": (0.5,),
    "summary_type": ("last",),
    "summary_activation": ("tanh",),
    "bos_token_id": (None, 3),
    "eos_token_id": (None, 3, [3, 4]),
    "pad_token_id": (5,),
    "sliding_window": (4, 16),
    "num_experts_per_tok": (1, 3),
    "num_local_experts": (3,),
    "rope_parameters": ROPE,
    "experts_implementation": ("batched_mm",),
}
#: Fields of files of forks and older versions, which current classes of transformers lack.
STRANGE: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (0.5,),
    "quantization_config": ({"quant_method": "fp8"},),
    "residual_multiplier": (0.22,),
    "norm_topk_prob": (False,),
    "layer_types": (["sliding_attention"],),
    "field_of_a_fork": (True,),
}
#: Fields with a value that is refused; all other changes give equal logits.
REFUSED = {
    "GPT2": {
        *("architectures", "model_type", "is_encoder_decoder", "activation_function"),
        *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    },
    "Llama": {
        *("architectures", "model_type", "is_encoder_decoder", "hidden_act", "pretraining_tp"),
        "rope_parameters",
    },
    "Mixtral": {
        *("architectures", "model_type", "is_encoder_decoder", "hidden_act", "sliding_window"),
        "rope_parameters",
    },
}
#: Parts of errors that do not name the field.
WORDS = {"architectures": "no family reads LlamaForSequ", "rope_parameters": "rotary"}


def others(name: str, value: object) -> tuple[Any, ...]:
    """Returns plausible other values of a field."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1,)
    if isinstance(value, float):
        return (3 * value + 0.01,)
    raise AssertionError(f"give another value of {name}, which is {value!r}, in OTHERS")


def their_model(kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**EAGER, **settings)
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            gain = key.endswith("weight") and ("norm" in key or "ln_" in key)
            parameter.normal_(1.0 if gain else 0.0, 0.3)
    return model


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Returns logits ``[b, s, v]`` of a model in a folder; raises CheckpointError if refused."""
    source = ForeignModel(folder)
    model = GPT(GPTConfig.from_dict(source.model.config), Mesh.single())
    source.load_tensors(parameter_views(model, collect_shardings(model), model.mesh))
    with torch.no_grad():
        found: torch.Tensor = model(tokens)[..., : model.config.vocab_size]
    return found.transpose(0, 1)


@pytest.mark.parametrize("kind", SMALL)
def test_every_changed_field_gives_equal_logits_or_is_refused(kind: str, tmp_path: Path) -> None:
    small = SMALL[kind]
    fields = their_model(kind, small).config.to_dict() | {"model_type": kind.lower()}
    changes = [(name, other) for name, value in fields.items() for other in others(name, value)]
    strange = [(name, other) for name, values in STRANGE.items() for other in values]
    tokens = torch.arange(24).reshape(2, 12) % 49
    outcomes: dict[str, set[str]] = {"equal": set(), "refused": set()}
    for at, (name, other) in enumerate([*changes, *strange]):
        given = (
            {} if name in ("architectures", "model_type") or at >= len(changes) else {name: other}
        )
        folder = tmp_path / str(at)
        theirs = their_model(kind, small | given)
        theirs.save_pretrained(folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: other}))
        try:
            ours = our_logits(folder, tokens)
        except CheckpointError as error:
            assert WORDS.get(name, name) in str(error), f"{name} = {other!r}: {error}"
            outcomes["refused"].add(name)
            continue
        theirs.config.return_dict = True  # transformers' Llama raises an exception without it
        with torch.no_grad():
            expected = theirs(tokens).logits
        assert expected.abs().max() > 1
        assert torch.allclose(ours, expected, rtol=0, atol=1e-4), f"{name} = {other!r}"
        outcomes["equal"].add(name)
    assert outcomes["refused"] == REFUSED[kind] | STRANGE.keys()
    assert outcomes["equal"] >= fields.keys() - REFUSED[kind]


@pytest.mark.parametrize("kind", SMALL)
def test_every_missing_field_has_the_default_of_transformers(kind: str) -> None:
    family, cls = find_family(kind.lower()), getattr(transformers, f"{kind}Config")
    values = json.loads(cls(**SMALL[kind]).to_json_string(use_diff=False))
    refused = set()
    for name in values:
        left = {key: value for key, value in values.items() if key != name}
        try:
            found = family.config_from_hf(left)
        except ConfigError as error:
            assert "lacks" in str(error)
            refused.add(name)
            continue
        whole = json.loads(cls.from_dict(left).to_json_string(use_diff=False))
        assert found == family.config_from_hf(whole), name
    assert refused < SMALL[kind].keys() | {"num_experts_per_tok"}
