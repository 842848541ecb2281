"""What an import of a folder says about the tokenizer beside the weights."""

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from megatron_ckpt.formats.huggingface import CONFIG
from megatron_ckpt.formats.source import HUGGINGFACE, TOKENIZER
from megatron_ckpt.formats.special_tokens import TOKENIZER_CONFIG, TOKENIZER_FILE
from megatron_ckpt.formats.tokenizer_classes import class_note

#: Names of files of tokenizers, known and unknown.
_PATTERNS = (
    "*tokeniz*",
    "*.tiktoken",
    "tekken.json",
    "*spiece.model",
    "sentencepiece*",
    "vocab*",
    "merges*",
    "encoder.json",
    "bpe.codes",
    "normalizer.json",
    "*chat_template*",
    "special_tokens*",
    "added_tokens*",
)
#: Files that make a tokenizer together with those of `TOKENIZER_FILES`.
_WITHOUT_EFFECT = ("tokenizer.json.*", "*.md")


def tokenizer_notes(folder: Path, files: Mapping[str, Path | bytes]) -> list[str]:
    """Returns sentences about files of a tokenizer that are left out or read in another way.

    Args:
        folder: The folder of the model.
        files: The files that the checkpoint keeps, by their names there.

    Raises:
        CheckpointError: A file of the tokenizer is not a JSON object.
    """
    notes = []
    names = {name.removeprefix(f"{TOKENIZER}/") for name in files if name.startswith(TOKENIZER)}
    left = [
        each.name
        for each in sorted(folder.iterdir())
        if any(fnmatch(each.name.lower(), pattern) for pattern in _PATTERNS)
        and not any(fnmatch(each.name.lower(), pattern) for pattern in _WITHOUT_EFFECT)
        and not any(name == each.name or name.startswith(f"{each.name}/") for name in names)
    ]
    if left:
        notes.append(f"{folder}: not kept in the checkpoint: {', '.join(left)}")
    if names and TOKENIZER_FILE not in names:
        notes.append(
            f"{folder} has no {TOKENIZER_FILE}, only {', '.join(sorted(names))}; to generate text, "
            "give one of these with --tokenizer-model and its --tokenizer-type"
        )
    paths = {
        TOKENIZER_FILE: f"{TOKENIZER}/{TOKENIZER_FILE}",
        TOKENIZER_CONFIG: f"{TOKENIZER}/{TOKENIZER_CONFIG}",
        CONFIG: f"{HUGGINGFACE}/{CONFIG}",
    }
    content = {key: files[name] for key, name in paths.items() if name in files}
    read = {k: v if isinstance(v, bytes) else v.read_bytes() for k, v in content.items()}
    if (note := class_note(read)) is not None:
        notes.append(f"{folder}: {note}")
    return notes
