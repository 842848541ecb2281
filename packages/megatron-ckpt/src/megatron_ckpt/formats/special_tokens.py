"""Ids of special tokens from the files of a tokenizer, for ``config.json``."""

from collections.abc import Mapping
from typing import Any, Final

from megatron_ckpt.json_input import parse_object

ROLES: Final = ("bos", "eos", "pad")
TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def special_token_ids(files: Mapping[str, bytes]) -> dict[str, int | None]:
    """Returns `bos_token_id`, `eos_token_id` and `pad_token_id`; None for a missing token.

    Without them `transformers` uses its own defaults, which are other tokens. A tokenizer that has
    only an end-of-document token (`eod_token`) uses it as the end of text as well.

    Args:
        files: The content of `tokenizer.json` and `tokenizer_config.json`, as far as they exist.

    Raises:
        CheckpointError: A file is not a JSON object. Entries of an unknown form are skipped.
    """
    config = parse_object(files.get(TOKENIZER_CONFIG, b"{}"), TOKENIZER_CONFIG)
    numbers = _vocabulary(parse_object(files.get(TOKENIZER_FILE, b"{}"), TOKENIZER_FILE))
    names = {role: token_content(config.get(f"{role}_token")) for role in ROLES}
    names["eos"] = names["eos"] or token_content(config.get("eod_token"))
    return {
        f"{role}_token_id": None if name is None else numbers.get(name)
        for role, name in names.items()
    }


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            found[token["content"]] = token.get("id")
    return {text: number for text, number in found.items() if type(number) is int}


def token_content(token: Any) -> str | None:
    """Returns the text of a token, which may be a serialised AddedToken."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
