"""What a request may say: one declaration, from which it is checked and documented.

Names, defaults and ranges are those of Megatron-LM's text generation server.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

MAX_PROMPTS = 128

LARGEST_SEED = 2**53 - 1
"""Integers up to this are exact in every JSON implementation."""

MAX_DIGITS = 400
"""Integers with more characters are read as infinite; no field takes one nearly as long."""

# Fields of Megatron-LM's servers, past and present, that are not honoured here, and why.
REFUSED = {
    "max_len": "it was renamed to tokens_to_generate",
    "sentences": "it was renamed to prompts",
    "top_p_decay": "top_p stays as it is for the whole continuation",
    "top_p_bound": "top_p stays as it is for the whole continuation",
    "stop_on_eol": "a continuation ends with its document or at tokens_to_generate",
    "stop_on_double_eol": "a continuation ends with its document or at tokens_to_generate",
    "stop_token": "the model's own tokenizer says which token ends a document",
    "prevent_newline_after_colon": "no token is ever excluded",
    "beam_width": "there is no beam search",
    "length_penalty": "there is no beam search",
    "no_log": "prompts and texts are never logged",
}


class RequestError(Exception):
    """A request that is refused: the HTTP status and one sentence for its sender."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class GenerateRequest:
    """What is to be generated; the fields are those of the JSON body."""

    prompts: tuple[str, ...]
    tokens_to_generate: int = 64
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    add_BOS: bool = False  # noqa: N815
    random_seed: int | None = None


def request_schema(positions: int) -> dict[str, Any]:
    """Returns the JSON Schema of a body, for a model with that many positions."""
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
                "description": "Texts to continue. An empty one needs add_BOS.",
            },
            "tokens_to_generate": {
                "type": "integer",
                "minimum": 0,
                "maximum": positions,
                "default": 64,
                "description": "Tokens to generate for each prompt at most. Prompt and new tokens "
                "together must fit into the model's positions. 0 only scores the prompts and needs "
                "logprobs.",
            },
            "logprobs": {
                "type": "boolean",
                "default": False,
                "description": "Return log-probabilities of the tokens, by the model itself: "
                "temperature, top_k and top_p have no part in them.",
            },
            "temperature": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": 100,
                "default": 1.0,
                "description": "Divides the logits. For the likeliest tokens, set top_k to 1.",
            },
            "top_k": {
                "type": "integer",
                "minimum": 0,
                "maximum": 1000,
                "default": 0,
                "description": "Draw from the likeliest k tokens; 0 is no limit. Excludes top_p.",
            },
            "top_p": {
                "type": "number",
                "minimum": 0,
                "maximum": 1,
                "default": 0.0,
                "description": "Draw from the likeliest tokens that together reach this "
                "probability; 0 is no limit. Excludes top_k.",
            },
            "add_BOS": {
                "type": "boolean",
                "default": False,
                "description": "Begin every prompt with the tokenizer's token for that. An error "
                "if it has none.",
            },
            "random_seed": {
                "type": "integer",
                "minimum": 0,
                "maximum": LARGEST_SEED,
                "description": "Repeats an answer. Prompt i draws with random_seed + i, so equal "
                "prompts have different continuations. Without it every answer is drawn anew.",
            },
        },
    }


def parse_request(body: bytes, schema: dict[str, Any]) -> GenerateRequest:
    """Reads a request's body.

    Raises:
        RequestError: status 400 and a sentence that names what is wrong.
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
    request = GenerateRequest(**values)
    _check_together(request)
    return request


def _parse_object(body: bytes) -> dict[str, Any]:
    def integer(digits: str) -> int | float:
        # Python reads no longer ones; an infinite value is refused with the name of its field.
        return (
            int(digits) if len(digits) <= MAX_DIGITS else math.copysign(math.inf, int(digits[:2]))
        )

    def no_constant(name: str) -> Any:
        raise RequestError(400, f"the body is not JSON: it holds {name}, which JSON has not")

    def no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise RequestError(400, "the body names a field twice")
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
    """Returns a field's value in its Python type."""
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
            _checked(f"{name}[{place}]", item, schema["items"]) for place, item in enumerate(value)
        )
    return _checked_number(name, value, schema)


def _checked_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(400, f"{name} must be a string, not {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(
            400, f"{name} holds half of a surrogate pair, which is not a character"
        ) from None
    return value


def _checked_number(name: str, value: Any, schema: dict[str, Any]) -> int | float:
    whole = schema["type"] == "integer"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # JSON does not tell 5 from 5.0. Comparisons are exact for integers of any length, which do not
    # always fit into a float; 1e999 is read as infinity.
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
    """Checks what one field means for another."""
    if request.top_k > 0 and request.top_p > 0:
        raise RequestError(400, "top_k and top_p cannot both be set: leave one of them out")
    if request.tokens_to_generate == 0 and not request.logprobs:
        raise RequestError(400, "tokens_to_generate is 0, which needs logprobs to be true")
    if not request.add_BOS:
        for place, prompt in enumerate(request.prompts):
            if not prompt:
                raise RequestError(400, f"prompts[{place}] is empty, which needs add_BOS: true")


def _shown(value: Any) -> str:
    """Returns a value for a message, on one line and not long."""
    if isinstance(value, float) and math.isinf(value):
        return "a number beyond 1.8e308" if value > 0 else "a number below -1.8e308"
    try:
        text = json.dumps(value)
    except RecursionError:
        return "what is nested so deeply"
    return text if len(text) <= 40 else f"{text[:40]}..."
