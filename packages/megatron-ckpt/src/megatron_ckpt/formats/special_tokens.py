"""Numbers of special tokens, from a tokenizer's files, for readers that ask a model for them."""

import json
from collections.abc import Mapping
from typing import Any, Final

ROLES: Final = ("bos", "eos", "pad")
TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def special_token_ids(files: Mapping[str, bytes]) -> dict[str, int | None]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id`; None where there is no such token.

    Without them `transformers` takes numbers of its own, which are other tokens here. A tokenizer
    that only says what ends a document (`eod_token`) ends a text with it, too.

    Args:
        files: content of `tokenizer.json` and `tokenizer_config.json`, as far as there are any.
    """
    config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    numbers = _vocabulary(json.loads(files.get(TOKENIZER_FILE, b"{}")))
    names = {role: _content(config.get(f"{role}_token")) for role in ROLES}
    names["eos"] = names["eos"] or _content(config.get("eod_token"))
    return {f"{role}_token_id": numbers.get(name or "") for role, name in names.items()}


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    found = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in tokenizer.get("added_tokens") or ():
        found[token["content"]] = token["id"]
    return found


def _content(token: Any) -> str | None:
    """Return the text of a token that may be given as a serialised AddedToken."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
