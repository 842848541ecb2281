"""Every field of transformers' configuration, changed one at a time or left out.

A changed field gives equal outputs or an error that names it; a missing field has transformers'
default. The reference is transformers' model with the changed configuration.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron_ckpt import CheckpointError
from megatron_ckpt.families import Family, detect_family, find_family
from megatron_models import ConfigError

from families.case import FamilyCase
from families.parity import LIMIT, largest_error, our_model
from families.theirs import their_config, their_model, write

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
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
    "architectures": (["AnotherForSequenceClassification"],),
    "dtype": ("float16",),
    "torch_dtype": ("bfloat16",),
    "transformers_version": ("4.40.0",),
    "problem_type": ("regression",),
    "id2label": ({"0": "A", "1": "B", "2": "C"},),
    "label2id": ({"A": 0, "B": 1, "C": 2},),
    "_name_or_path": ("elsewhere",),
    "model_type": ("another",),
    "vocab_size": (140, 160),
    "n_embd": (40,),
    "hidden_size": (40,),
    "n_head": (2, 8),
    "num_attention_heads": (2, 8),
    "num_key_value_heads": (1, 4),
    "n_inner": (None, 56),
    "n_positions": (40, 80),
    "max_position_embeddings": (40, 80),
    "activation_function": ("gelu", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu"),
    "hidden_act": ("gelu", "swish", "relu"),
    "head_dim": (4, 10),
    "resid_pdrop": (0.5,),
    "embd_pdrop": (0.5,),
    "attn_pdrop": (0.5,),
    "attention_dropout": (0.5,),
    "hidden_dropout": (0.5,),
    "router_jitter_noise": (0.5,),
    "summary_type": ("last",),
    "summary_activation": ("tanh",),
    "bos_token_id": (None, 3),
    "eos_token_id": (None, 3, [3, 4]),
    "pad_token_id": (5,),
    "sliding_window": (4, 64),
    "num_experts_per_tok": (1, 3),
    "num_local_experts": (3,),
    "rope_parameters": ROPE,
    "experts_implementation": ("batched_mm",),
}
#: Fields of files of forks and older versions. Unless the class in transformers has one of them, it
#: is refused.
STRANGE: dict[str, tuple[Any, ...]] = {
    "quantization_config": ({"quant_method": "awq"},),
    "residual_multiplier": (0.22,),
    "norm_topk_prob": (False,),
    "alibi": (True,),
    "kv_lora_rank": (8,),
    "field_of_a_fork": (True,),
}
#: Parts of errors that do not name the field.
WORDS = {"architectures": "no family reads AnotherForSe", "rope_parameters": "rotary"}
#: Fields that transformers' class does not get: they describe the file.
_OF_THE_FILE = ("architectures", "model_type")


@dataclass(frozen=True)
class Outcomes:
    """Fields with a value that gave equal outputs, and with a value that was refused."""

    fields: frozenset[str]
    equal: frozenset[str]
    refused: frozenset[str]


def changed_fields(case: FamilyCase, folder: Path) -> Outcomes:
    """Changes every field of a case, one at a time.

    Raises:
        ValueError: A change gives other outputs, or an error that does not name the field.
    """
    found = _Comparison(case, folder)
    equal, refused = set(), set()
    for name, other in found.changes():
        (equal if found.is_equal(name, other) else refused).add(name)
    return Outcomes(frozenset(found.fields), frozenset(equal), frozenset(refused))


class _Comparison:
    """The models of one case: the unchanged one of ours is built once."""

    def __init__(self, case: FamilyCase, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._family: Family = find_family(case.family)
        self._words = WORDS | dict(case.words)
        base = their_model(case, {})
        self.fields: dict[str, Any] = base.config.to_dict() | {
            "model_type": base.config.model_type,
            "architectures": [case.model_class],
        }
        self._base = our_model(write(base, folder / "base"))
        self._inputs = case.kind.inputs(base, 2, 24)
        self._expected = case.kind.ours(self._base, self._inputs)

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Yields fields and other values of them."""
        for name, value in self.fields.items():
            for other in self._others(name, value):
                yield name, other
        for name, values in STRANGE.items():
            if name not in self.fields:
                yield from ((name, other) for other in values)

    def is_equal(self, name: str, other: Any) -> bool:
        """Returns whether the changed field gives equal outputs; False if it is refused."""
        coupled = dict(self._case.coupled.get(name, {}))
        given = {} if name in _OF_THE_FILE or name not in self.fields else {name: other, **coupled}
        config = their_config(self._case, given)
        content = json.loads(config.to_json_string(use_diff=False))
        content |= {"architectures": [self._case.model_class], name: other, **coupled}
        try:
            detect_family(content["architectures"])
            ours = self._family.config_from_hf(content)
        except (CheckpointError, ConfigError) as problem:
            if self._words.get(name, name) not in str(problem):
                raise ValueError(f"{name} = {other!r}: {problem}") from problem
            return False
        theirs = their_model(self._case, given)
        kind = self._case.kind
        limited = kind.limited(self._inputs, theirs.config)
        if ours == self._base.config:
            found = self._expected
        else:
            folder = write(theirs, self._folder / "changed", **{name: other}, **coupled)
            found = kind.ours(our_model(folder), limited)
        expected = kind.theirs(theirs, limited)
        small = max(float(each.abs().max()) for each in expected) < 1
        wrong = largest_error(found, expected)
        if not wrong <= LIMIT and ours != self._base.config:
            # Rounding of float32 adds up over more layers; it is no difference of the models.
            found = kind.ours(our_model(folder, torch.float64), limited)
            wrong = largest_error(found, kind.theirs(theirs.double(), limited))
        if small or not wrong <= LIMIT:
            raise ValueError(f"{name} = {other!r}: the error is {wrong:.1e}")
        return True

    def _others(self, name: str, value: object) -> tuple[Any, ...]:
        """Returns plausible other values of a field."""
        if name in self._case.others:
            return self._case.others[name]
        if name in OTHERS:
            return OTHERS[name]
        if isinstance(value, bool):
            return (not value,)
        if isinstance(value, int):
            return (value + 1,)
        if isinstance(value, float):
            return (3 * value + 0.01,)
        raise ValueError(f"give another value of {name}, which is {value!r}, in the case's others")


def missing_fields(case: FamilyCase) -> frozenset[str]:
    """Leaves out every field, one at a time; returns those that are required.

    Raises:
        ValueError: A missing field does not have transformers' default.
    """
    family: Any = find_family(case.family)
    base = their_config(case, {})
    values = json.loads(base.to_json_string(use_diff=False))
    required = set()
    for name in values:
        left = {key: value for key, value in values.items() if key != name}
        found = _outcome(family, left)
        if isinstance(found, str) and "lacks" in found:
            required.add(name)
            continue
        try:
            read = json.loads(json.dumps(left), object_hook=_number)
            whole = json.loads(type(base).from_dict(read).to_json_string(use_diff=False))
        except Exception:  # transformers refuses its default beside the other values
            if isinstance(found, str):
                continue
            raise
        if found != _outcome(family, whole):
            raise ValueError(f"a missing {name} has another default than in transformers")
    return frozenset(required)


def _number(values: dict[str, Any]) -> Any:
    """Returns a number that JSON cannot express, in transformers' spelling, or the map itself."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _outcome(family: Any, content: dict[str, Any]) -> Any:
    """Returns our configuration, or why it is refused: a default need not fit small settings."""
    try:
        return family.config_from_hf(content)
    except ConfigError as problem:
        return str(problem)
