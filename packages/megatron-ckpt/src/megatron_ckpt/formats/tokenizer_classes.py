"""Parts of a ``tokenizer.json`` that a class of transformers replaces.

transformers 5 builds the tokenizers of some classes anew: it takes vocabulary, merges and
post-processor from ``tokenizer.json`` and the rest from the class, without a message. Our packages
use the file as it is. Where both differ on a text, an import says so. The tables state what
transformers 5.23 does; a test compares them with it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from megatron_ckpt.formats.special_tokens import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    token_content,
)
from megatron_ckpt.json_input import parse_object

_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GENERIC: Final = "TokenizersBackend"
#: ``model_type`` -> the class that transformers has for it, as far as families read it.
REGISTERED: Final = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mamba2"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("glm4", "granite", "mistral", "mixtral", "olmo2", "olmo3", "phi3"), _GENERIC),
    "gpt2": "GPT2Tokenizer",
    "cohere": "CohereTokenizer",
    "cohere2": "CohereTokenizer",
    "roberta": "RobertaTokenizer",
}
#: Types whose ``tokenizer_class`` transformers does not believe.
_DISTRUSTED: Final = ("qwen2", "phi3")

#: Texts on which tokenizers of these kinds differ: digits, composed and decomposed accents, runs of
#: white space, line ends, contractions, text after a special token.
PROBE: Final = (
    "a",
    " a b",
    "a  b   c",
    "1234567",
    "x12 345",
    "e\u0301 \u00e9",
    "I'LL don't",
    "a.\n\n b\t\tc",
    "\u00a0a\u3000b",
    "\u4f60\u597d 12\u3002",
    "\u2581a",
)


def _byte_level(space: bool, use_regex: bool = True) -> dict[str, Any]:
    kind = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True}
    return {**kind, "use_regex": use_regex}


def _gpt2(space: bool) -> dict[str, Any]:
    return {"normalizer": None, "pre_tokenizer": _byte_level(space)}


def _gpt_neox(space: bool) -> dict[str, Any]:
    return {"normalizer": {"type": "NFC"}, "pre_tokenizer": _byte_level(space)}


def _qwen2(space: bool) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}
    steps = [split, _byte_level(space, use_regex=False)]
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }


def _cohere(space: bool) -> dict[str, Any]:
    steps = [{"type": "Digits", "individual_digits": True}, _byte_level(space)]
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }


def _gemma(_: bool) -> dict[str, Any]:
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    return {"normalizer": replaced, "pre_tokenizer": {**split, "invert": False}, **_PIECES}


def _llama(space: bool) -> dict[str, Any]:
    scheme = "first" if space else "never"
    marks = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": marks, **_PIECES}


_PIECES: Final[Mapping[str, Any]] = {"fuse_unk": True, "byte_fallback": True}
#: Class -> its parts for a value of ``add_prefix_space``, and the default of that setting.
CLASSES: Final[Mapping[str, tuple[Callable[[bool], dict[str, Any]], bool]]] = {
    "GPT2Tokenizer": (_gpt2, False),
    "RobertaTokenizer": (_gpt2, False),
    "GPTNeoXTokenizer": (_gpt_neox, False),
    "Qwen2Tokenizer": (_qwen2, False),
    "CohereTokenizer": (_cohere, False),
    "GemmaTokenizer": (_gemma, False),
    "LlamaTokenizer": (_llama, True),
    "CodeLlamaTokenizer": (_llama, True),
}


def rebuilding_class(config: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Returns the class that transformers builds anew for a folder, or None.

    Args:
        config: The content of ``config.json``.
        settings: The content of ``tokenizer_config.json``.
    """
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    kind = config.get("model_type")
    registered = REGISTERED.get(kind) if isinstance(kind, str) else None
    if named is None or kind in _DISTRUSTED:
        chosen = registered or named
    else:
        chosen = _GENERIC if registered == _GENERIC else named
    return chosen if chosen in CLASSES else None


def rebuilt(definition: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> Any:
    """Returns the content of ``tokenizer.json`` with the parts of a class.

    Args:
        definition: The content of ``tokenizer.json``, with a model of BPE.
        name: A class in `CLASSES`.
        settings: The content of ``tokenizer_config.json``.
    """
    build, default = CLASSES[name]
    space = settings.get("add_prefix_space")
    parts = build(default if space is None else bool(space))
    model = {
        **definition["model"],
        "dropout": None,
        "ignore_merges": False,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": parts.pop("fuse_unk", False),
        "byte_fallback": parts.pop("byte_fallback", False),
        "unk_token": None,
    }
    if name in ("GemmaTokenizer", "CodeLlamaTokenizer"):
        model["unk_token"] = token_content(settings.get("unk_token")) or "<unk>"
    return {**definition, **parts, "model": model}


def _is_byte_level(definition: Mapping[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer"))


def class_note(files: Mapping[str, bytes]) -> str | None:
    """Returns a sentence if transformers would give other ids for a text of `PROBE`, or None.

    Args:
        files: The content of ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json``, as
            far as they exist.

    Raises:
        CheckpointError: A file is not a JSON object.
    """
    read = {name: parse_object(files.get(name, b"{}"), name) for name in _NAMES}
    definition, settings = read[TOKENIZER_FILE], read[TOKENIZER_CONFIG]
    name = rebuilding_class(read["config.json"], settings)
    model = definition.get("model")
    if name is None or not isinstance(model, dict) or model.get("type") != "BPE":
        return None
    if name == "LlamaTokenizer" and _is_byte_level(definition):
        return None  # transformers leaves such a file as it is
    theirs = rebuilt(definition, name, settings)
    changed = [
        part
        for part in ("normalizer", "pre_tokenizer", "model")
        if _plain(theirs[part]) != _plain(definition.get(part))
    ]
    if not changed:
        return None
    start = f"transformers 5 replaces parts of {TOKENIZER_FILE} by those of {name}"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return (
            f"{start} ({', '.join(changed)}), which may give other ids than here; install "
            "megatron-ckpt[tokenizers] for an example"
        )
    try:
        pair = [Tokenizer.from_str(json.dumps(each)) for each in (definition, theirs)]
    except Exception:  # noqa: BLE001 - the loading of the tokenizer reports what is wrong
        return None
    for text in PROBE:
        ours, other = (each.encode(text, add_special_tokens=False).ids for each in pair)
        if ours != other:
            return (
                f"{start}: {text!r} is {other} there and {ours} here, as the file says; "
                f'"tokenizer_class": "{_GENERIC}" in {TOKENIZER_CONFIG} makes it {ours} there'
            )
    return None


_NAMES: Final = (TOKENIZER_FILE, TOKENIZER_CONFIG, "config.json")


def _plain(part: Any) -> Any:
    """Returns a part without what does not change ids and what libraries write as a default."""
    if isinstance(part, dict):
        left = ("trim_offsets", "vocab", "merges", "dropout", "unk_token")
        return {key: _plain(each) for key, each in part.items() if key not in left and each}
    return [_plain(each) for each in part] if isinstance(part, list) else part
