"""Defaults for generation that a model brings along.

A model in Hugging Face's format has settings of generation in ``generation_config.json``, or, if
that file is missing, among the settings in ``config.json``. As in transformers, one file counts as
a whole: an ``eos_token_id`` of ``config.json`` has no effect beside a ``generation_config.json``.
The import of a GGUF file writes its metadata in the same form. Each field is either applied or
reported (`megatron_infer.generation_fields`).
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_infer.errors import InferError
from megatron_infer.generation_fields import (
    ANY_STRATEGY,
    APPLIED,
    NESTED,
    SAMPLING_ONLY,
    WITHOUT_EFFECT,
)
from megatron_infer.params import SamplingParams

FOLDER = "huggingface"
GENERATION, CONFIG = "generation_config.json", "config.json"
TOP_K = 50
"""The ``top_k`` of transformers for ``"do_sample": true`` without one."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Settings of generation that a model brings along; options of a user come first.

    Attributes:
        stop_tokens: Tokens that end a text (``eos_token_id``, one or a list).
        start_token: The token that starts the output for a source: ``decoder_start_token_id``, or
            without one ``bos_token_id``.
        params: Fields of `SamplingParams` by name.
        adds_special_tokens: Whether a text starts and ends with the tokens that the tokenizer adds
            to it, such as ``<s>``. True for a model in Hugging Face's format or from a GGUF file.
        notes: What was applied and what was not, one line each.
    """

    stop_tokens: frozenset[int] = frozenset()
    start_token: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    adds_special_tokens: bool = False
    notes: tuple[str, ...] = ()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Returns the settings of a request: the given ones, then those of the model."""
        return SamplingParams(**{**self.params, **given})


def read_defaults(
    names: Collection[str], read: Callable[[str], bytes], where: str
) -> GenerationDefaults:
    """Reads the defaults from the files beside the weights.

    Args:
        names: The names of the files, as in a checkpoint (``huggingface/config.json``).
        read: Returns the content of a file by its name.
        where: The path of the model, for messages.

    Raises:
        InferError: A file is not JSON, or a field that is applied has a value of a wrong type.
    """
    found = {
        name: _parse(read(f"{FOLDER}/{name}"), f"{name} of {where}")
        for name in (GENERATION, CONFIG)
        if f"{FOLDER}/{name}" in names
    }
    if not found:
        return GenerationDefaults()
    config = _of_config(found.get(CONFIG, {}))
    first, name = (found[GENERATION], GENERATION) if GENERATION in found else (config, CONFIG)
    location = f"{name} of {where}"
    stops = _tokens(first, "eos_token_id", location)
    starts = _tokens(first, "decoder_start_token_id", location)
    starts += _tokens(first, "bos_token_id", location)
    left = _not_applied(first)
    if name == GENERATION:
        starts += _tokens(config, "decoder_start_token_id", f"{CONFIG} of {where}")
        left += [
            f"{key} {_short(config[key])} of {CONFIG} ({GENERATION} comes first)"
            for key in ("eos_token_id",)
            if not {*_tokens(config, key, f"{CONFIG} of {where}")} <= {*stops}
        ]
    params = _params(first, location)
    applied = [f"{key} {value}" for key, value in params.items()]
    notes = [f"{name}: applied {', '.join(applied)}"] if applied else []
    notes += [f"{name}: not applied: {'; '.join(left)}"] if left else []
    return GenerationDefaults(
        frozenset(stops), starts[0] if starts else None, params, True, tuple(notes)
    )


def _parse(content: bytes, location: str) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise InferError(f"{location} is not JSON; copy the file again") from None
    if not isinstance(parsed, dict):
        raise InferError(f"{location} is not a JSON object; copy the file again")
    return {key: value for key, value in parsed.items() if value is not None}


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of generation in a ``config.json``, also those of its text model."""
    inner: Any = next((config[name] for name in NESTED if config.get(name)), {})
    both = {**(inner if isinstance(inner, dict) else {}), **config}
    named = APPLIED | SAMPLING_ONLY.keys() | ANY_STRATEGY.keys()
    return {key: value for key, value in both.items() if key in named and value is not None}


def _tokens(values: Mapping[str, Any], key: str, location: str) -> list[int]:
    """Returns the ids in a field; a negative one stands for no token."""
    value = values.get(key, [])
    ids = value if isinstance(value, list) else [value]
    if any(type(each) is not int for each in ids):
        raise InferError(
            f"{location}: {key} is {_short(value)}, not a token id or a list of token ids; "
            "correct it"
        )
    return [each for each in ids if each >= 0]


def _params(values: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that a file sets."""
    params: dict[str, Any] = {}
    if values.get("do_sample") is True:
        params = {"temperature": 1.0, "top_k": TOP_K, "top_p": 1.0}
        params |= {key: values[key] for key in params if key in values}
    elif values.get("do_sample") is False:
        params = {"temperature": 0.0}
    if "max_new_tokens" in values:
        params["max_new_tokens"] = values["max_new_tokens"]
    types = {one.name: (int, float) if one.type is float else int for one in fields(SamplingParams)}
    for key, value in params.items():
        if not isinstance(value, types[key]) or isinstance(value, bool):
            raise InferError(f"{location}: {key} is {_short(value)}, not a number; correct it")
    try:
        SamplingParams(**params)
    except InferError as error:
        raise InferError(f"{location}: {error}; correct it") from None
    return params


def _not_applied(values: Mapping[str, Any]) -> list[str]:
    """Returns a description of each field that has an effect in transformers but none here."""
    left = []
    for key, value in values.items():
        shown = f"{key} {_short(value)}"
        if key in SAMPLING_ONLY:
            if any(value == neutral for neutral in SAMPLING_ONLY[key]):
                continue
            if values.get("do_sample") is not True:
                left.append(f"{shown} (do_sample is not true)")
            elif key not in APPLIED:
                left.append(shown)
        elif key in ANY_STRATEGY:
            if not any(value == neutral for neutral in ANY_STRATEGY[key]):
                left.append(shown)
        elif key not in APPLIED and key not in WITHOUT_EFFECT:
            left.append(f"{shown} (unknown)")
    return left


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
