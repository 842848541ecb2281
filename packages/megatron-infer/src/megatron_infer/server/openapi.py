"""The OpenAPI document of a server. The tests send requests that it allows and that it forbids."""

from collections.abc import Mapping
from typing import Any

from megatron_infer._version import __version__
from megatron_infer.server.fields import request_schema

REFUSALS = {
    "400": "The body does not match the schema or the model. The message names the field.",
    "408": "The request did not arrive in time.",
    "413": "The body is too long.",
    "415": "The content type is not application/json.",
    "429": "Too many requests are waiting. Try again after the seconds in Retry-After.",
    "431": "The headers are too long.",
    "500": "The generation failed.",
    "503": "The server is stopping or out of memory.",
}
UNAUTHORIZED = "The token is missing or wrong."
FOREIGN = "The Host header does not name this server."

EXAMPLE = {"prompts": ["Hello world"], "tokens_to_generate": 1}


def openapi_document(
    positions: int, *, needs_token: bool, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the document for a model with ``positions`` positions.

    Args:
        positions: The number of positions.
        needs_token: Whether requests need a token.
        defaults: As for `request_schema`.
    """
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "megatron-infer",
            "version": __version__,
            "description": "Text generation with one model. PUT /api has the fields, ranges and "
            "answers of Megatron-LM's text generation server.",
        },
        "paths": {
            "/api": {"put": _generation("generate", "Continue texts", _json("Answer"))},
            "/api/stream": {
                "post": _generation(
                    "stream", "Continue texts and stream the continuations", _events()
                )
            },
            "/info": {"get": _reading("info", "Description of the model", _json("Info"))},
            "/openapi.json": {
                "get": _reading(
                    "openapi",
                    "This document",
                    {"application/json": {"schema": {"type": "object"}}},
                )
            },
            "/health": {"get": _health()},
            "/": {"get": _page()},
        },
        "components": {"schemas": _schemas(positions, defaults)},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path in ("/api", "/api/stream", "/info", "/openapi.json"):
            for operation in document["paths"][path].values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _refusal(UNAUTHORIZED)
    else:
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"]["403"] = _refusal(FOREIGN)
    return document


def _schemas(positions: int, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    strings = {"type": "array", "items": {"type": "string"}}
    return {
        "Request": request_schema(positions, defaults),
        "Answer": {
            "type": "object",
            "required": ["text", "segments", "tokens", "logprobs", "finish_reasons"],
            "additionalProperties": False,
            "properties": {
                "text": {**strings, "description": "Each prompt with its continuation."},
                "segments": {
                    "type": "array",
                    "items": strings,
                    "description": "The text of each token of `text`.",
                },
                "tokens": {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}},
                    "description": "The id of each token of `text`.",
                },
                "logprobs": {
                    "type": ["array", "null"],
                    "items": {"type": "array", "items": {"type": "number", "maximum": 0}},
                    "description": "Log-probability of each token but the first; null unless "
                    "requested.",
                },
                "finish_reasons": {
                    "type": "array",
                    "items": {"enum": ["stop", "length", "positions"]},
                    "description": "Why each continuation ended: the document ended (stop), "
                    "tokens_to_generate was reached (length), or the model has no more positions "
                    "(positions).",
                },
            },
        },
        "Info": {
            "type": "object",
            "required": ["model", "parameters", "positions", "vocabulary", "device", "dtype"],
            "additionalProperties": False,
            "properties": {
                "model": {"type": "string"},
                "parameters": {
                    "type": "integer",
                    "description": "Number of parameters, without padding of the vocabulary.",
                },
                "positions": {"type": "integer"},
                "vocabulary": {"type": "integer"},
                "device": {"type": "string"},
                "dtype": {"type": "string"},
            },
        },
        "Health": {
            "type": "object",
            "required": ["status"],
            "additionalProperties": False,
            "properties": {"status": {"enum": ["ok", "stopping"]}},
        },
        "Refusal": {
            "type": "object",
            "required": ["message"],
            "additionalProperties": False,
            "properties": {"message": {"type": "string", "description": "One sentence."}},
        },
    }


def _generation(name: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    body = {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/Request"},
            "example": EXAMPLE,
        }
    }
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": "The generated text.", "content": content},
            **{status: _refusal(meaning) for status, meaning in REFUSALS.items()},
        },
    }


def _reading(name: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}},
    }


def _health() -> dict[str, Any]:
    operation = _reading("health", "Whether the server accepts requests", _json("Health"))
    operation["responses"]["503"] = {
        "description": "The server is stopping.",
        "content": _json("Health"),
    }
    return operation


def _page() -> dict[str, Any]:
    return _reading("page", "A page for trying the model", {"text/html": {"schema": {}}})


def _events() -> dict[str, Any]:
    return {
        "text/event-stream": {
            "schema": {
                "type": "string",
                "description": 'Server-sent events. First `waiting`: {"ahead": number of requests '
                'before this one, 0 if it starts at once}. Then `text`: {"index": index of the '
                'prompt, "text": new text}. Finally `done` with an Answer, or `failed` with a '
                "Refusal.",
            }
        }
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _refusal(meaning: str) -> dict[str, Any]:
    return {"description": meaning, "content": _json("Refusal")}
