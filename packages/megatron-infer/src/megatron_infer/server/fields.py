"""The fields of a request: one schema that both validation and documentation use.

Names, defaults and ranges are those of Megatron-LM's text generation server.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_PROMPTS = 128

LARGEST_SEED = 2**53 - 1
"""The largest integer that every JSON implementation represents exactly."""

MAX_DIGITS = 400
"""Integers with more characters are read as infinite; every field has a lower limit."""

# Fields of past and present servers of Megatron-LM that are not supported, with the reason.
REFUSED = {
    "max_len": "it was renamed to tokens_to_generate",
    "sentences": "it was renamed to prompts",
    "top_p_decay": "top_p is constant for the whole continuation",
    "top_p_bound": "top_p is constant for the whole continuation",
    "stop_on_eol": "a continuation ends with its document or at tokens_to_generate",
    "stop_on_double_eol": "a continuation ends with its document or at tokens_to_generate",
    "stop_token": "the tokenizer of the model defines the token that ends a document",
    "prevent_newline_after_colon": "tokens are never excluded",
    "beam_width": "there is no beam search",
    "length_penalty": "there is no beam search",
    "no_log": "prompts and texts are never logged",
}


class RequestError(Exception):
    """A refused request: the HTTP status and one sentence for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class GenerateRequest:
    """A request for generation, with the fields of the JSON body."""

    prompts: tuple[str, ...]
    tokens_to_generate: int = 64
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    add_BOS: bool = False  # noqa: N815
    random_seed: int | None = None


def request_defaults(params: Mapping[str, Any], *, starts_with_bos: bool) -> dict[str, Any]:
    """Returns the defaults of requests for a model.

    Args:
        params: The fields of `SamplingParams` that the model sets. ``max_new_tokens`` is not used:
            a request for as many tokens would exceed the limits of a server.
        starts_with_bos: Whether the tokenizer starts every text with the begin-of-text token.
    """
    defaults: dict[str, Any] = {"add_BOS": True} if starts_with_bos else {}
    if params.get("temperature") == 0.0:
        return defaults | {"top_k": 1}
    defaults |= {name: params[name] for name in ("temperature", "top_k") if name in params}
    if params.get("top_p", 1.0) < 1.0:
        defaults["top_p"] = params["top_p"]
    return defaults


def request_schema(positions: int, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the JSON Schema of a request body for a model with ``positions`` positions.

    Args:
        positions: The number of positions.
        defaults: Defaults of this model by field. Defaults to none but Megatron-LM's.
    """
    schema = _schema(positions)
    for name, value in (defaults or {}).items():
        schema["properties"][name]["default"] = value
    return schema


def _schema(positions: int) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["prompts"],
        "additionalProperties": False,
        "properties": {
            "prompts": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "maxItems": MAX_PROMPTS,
                "description": "Texts to continue. An empty text needs add_BOS.",
            },
            "tokens_to_generate": {
                "type": "integer",
                "minimum": 0,
                "maximum": positions,
                "default": 64,
                "description": "Largest number of tokens to generate for each prompt. Prompt and "
                "new tokens together must not exceed the positions of the model. 0 only scores "
                "the prompts and needs logprobs.",
            },
            "logprobs": {
                "type": "boolean",
                "default": False,
                "description": "Whether to return log-probabilities of the tokens. They do not "
                "depend on temperature, top_k and top_p.",
            },
            "temperature": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": 100,
                "default": 1.0,
                "description": "Divisor of the logits. For greedy decoding, set top_k to 1.",
            },
            "top_k": {
                "type": "integer",
                "minimum": 0,
                "maximum": 1000,
                "default": 0,
                "description": "Draw from the k likeliest tokens; 0 is no limit. Excludes top_p "
                "and replaces its default.",
            },
            "top_p": {
                "type": "number",
                "minimum": 0,
                "maximum": 1,
                "default": 0.0,
                "description": "Draw from the likeliest tokens that together reach this "
                "probability; 0 is no limit. Excludes top_k and replaces its default.",
            },
            "add_BOS": {
                "type": "boolean",
                "default": False,
                "description": "Whether to start every prompt with the begin-of-text token. An "
                "error if the tokenizer has none.",
            },
            "random_seed": {
                "type": "integer",
                "minimum": 0,
                "maximum": LARGEST_SEED,
                "description": "Seed that makes the answer reproducible. Prompt i uses "
                "random_seed + i, so equal prompts have different continuations. Without a seed, "
                "every answer is drawn anew.",
            },
        },
    }


def parse_request(body: bytes, schema: dict[str, Any]) -> GenerateRequest:
    """Parses and checks the body of a request.

    Raises:
        RequestError: Status 400 with a sentence that names the problem.
    """
    fields = _parse_object(body)
    known = schema["properties"]
    for name in fields:
        if name in REFUSED:
            raise RequestError(400, f"{name} is not supported: {REFUSED[name]}")
        if name not in known:
            raise RequestError(400, f"{_shown(name)} is not a field; known: {', '.join(known)}")
    if "prompts" not in fields:
        raise RequestError(400, "prompts is missing: a list of texts to continue")
    values = {name: _checked(name, value, known[name]) for name, value in fields.items()}
    if values.get("top_k", 0) > 0 and values.get("top_p", 0) > 0:
        raise RequestError(400, "top_k and top_p exclude each other; set only one of them")
    request = GenerateRequest(**(_defaults(known, values) | values))
    _check_together(request)
    return request


def _defaults(known: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of a model; a request for one of top_k and top_p sets both."""
    defaults = {name: field["default"] for name, field in known.items() if "default" in field}
    if values.keys() & {"top_k", "top_p"}:
        defaults |= {"top_k": 0, "top_p": 0.0}
    return defaults


def _parse_object(body: bytes) -> dict[str, Any]:
    def integer(digits: str) -> int | float:
        # Python does not parse longer ones. An infinite value is refused with the field's name.
        return (
            int(digits) if len(digits) <= MAX_DIGITS else math.copysign(math.inf, int(digits[:2]))
        )

    def no_constant(name: str) -> Any:
        raise RequestError(400, f"the body is not JSON: it has {name}, which JSON does not have")

    def no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise RequestError(400, "the body has a field twice")
        return result

    try:
        value = json.loads(
            body.decode(),
            parse_int=integer,
            parse_constant=no_constant,
            object_pairs_hook=no_repetition,
        )
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(400, f"the body is not JSON: {what}") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, not {_shown(value)}")
    return value


def _checked(name: str, value: Any, schema: dict[str, Any]) -> Any:
    """Returns the value of a field in its Python type."""
    kind = schema["type"]
    if kind == "boolean":
        if not isinstance(value, bool):
            raise RequestError(400, f"{name} must be true or false, not {_shown(value)}")
        return value
    if kind == "string":
        return _checked_text(name, value)
    if kind == "array":
        if not isinstance(value, list):
            raise RequestError(400, f"{name} must be a list of strings, not {_shown(value)}")
        if not schema["minItems"] <= len(value) <= schema["maxItems"]:
            raise RequestError(
                400, f"{name} must hold 1 to {schema['maxItems']} texts, not {len(value)}"
            )
        return tuple(
            _checked(f"{name}[{index}]", item, schema["items"]) for index, item in enumerate(value)
        )
    return _checked_number(name, value, schema)


def _checked_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(400, f"{name} must be a string, not {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(
            400, f"{name} has an unpaired surrogate, which is not a character"
        ) from None
    return value


def _checked_number(name: str, value: Any, schema: dict[str, Any]) -> int | float:
    whole = schema["type"] == "integer"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # JSON does not distinguish 5 and 5.0. Comparisons are exact for integers of any length, which
    # may exceed a float. 1e999 is parsed as infinity.
    if not number or (whole and isinstance(value, float) and value % 1 > 0):
        kind = "an integer" if whole else "a number"
        raise RequestError(400, f"{name} must be {kind}, not {_shown(value)}")
    least, most = schema.get("minimum"), schema["maximum"]
    above = schema.get("exclusiveMinimum")
    if value > most or (least is not None and value < least):
        raise RequestError(400, f"{name} must lie in {least or 0} to {most}, not {_shown(value)}")
    if above is not None and value <= above:
        raise RequestError(400, f"{name} must be greater than {above}, not {_shown(value)}")
    return int(value) if whole else float(value)


def _check_together(request: GenerateRequest) -> None:
    """Checks combinations of fields."""
    if request.tokens_to_generate == 0 and not request.logprobs:
        raise RequestError(400, "tokens_to_generate is 0, which needs logprobs: true")
    if not request.add_BOS:
        for index, prompt in enumerate(request.prompts):
            if not prompt:
                raise RequestError(400, f"prompts[{index}] is empty, which needs add_BOS: true")


def _shown(value: Any) -> str:
    """Returns a short representation of a value for a message, on one line."""
    if isinstance(value, float) and math.isinf(value):
        return "a number beyond 1.8e308" if value > 0 else "a number below -1.8e308"
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 40 else f"{text[:40]}..."
