"""The files of a tokenizer's folder that hold chat templates, and the special tokens they write."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_data.errors import DataError
from megatron_data.files import AtomicFile, read_json, read_text
from megatron_data.tokenizers.protocol import CONFIG_FILE

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
PROCESSOR_FILE, TOKENS_FILE = "chat_template.json", "special_tokens_map.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the templates for conversations without and with tools."""

_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NAME = re.compile(r"\w[\w.-]{0,99}")
_LEGACY = "added_tokens_decoder"  # with this key transformers does not read TOKENS_FILE


@dataclass(frozen=True)
class StoredTemplates:
    """The chat templates of a tokenizer's folder.

    Attributes:
        sources: The templates by name.
        variables: The special tokens that templates can write, such as `bos_token`.
        problem: Why the files cannot be used, or None. A tokenizer without conversations ignores
            it.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "StoredTemplates":
        """Reads the templates that Hugging Face transformers would use.

        `chat_template.jinja` and the files in `additional_chat_templates` come before
        `chat_template` in `tokenizer_config.json`, which is one template or a list with names. If
        there are none, the template is that of a processor, in `chat_template.json`.
        """
        folder = Path(folder)
        try:
            config = _object(folder / CONFIG_FILE)
            tokens = config if _LEGACY in config else config | _object(folder / TOKENS_FILE)
            return cls(_sources(folder, config), _special_tokens(tokens))
        except DataError as error:
            return cls(problem=str(error))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the templates as Hugging Face transformers does, and removes other ones."""
        folder = Path(folder)
        for old in (folder / TEMPLATE_FILE, *folder.glob(f"{TEMPLATE_FOLDER}/*.jinja")):
            old.unlink(missing_ok=True)
        for name, source in self.sources.items():
            file = TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja"
            (folder / file).parent.mkdir(exist_ok=True)
            with AtomicFile(folder / file) as writer:
                writer.write(source.encode())


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in sorted(folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files = {DEFAULT: folder / TEMPLATE_FILE} | files
    if files:
        return {name: read_text(path) for name, path in files.items()}
    if config.get("chat_template") is not None:
        return _by_name(config["chat_template"], folder / CONFIG_FILE)
    processor = _object(folder / PROCESSOR_FILE).get("chat_template")
    return {} if processor is None else _by_name(processor, folder / PROCESSOR_FILE)


def _by_name(content: Any, path: Path) -> dict[str, str]:
    """Returns the templates of a text, of a list of objects or of an object, by name."""
    if isinstance(content, dict):
        content = [{"name": name, "template": source} for name, source in content.items()]
    elif not isinstance(content, list):
        content = [{"name": DEFAULT, "template": content}]
    sources = {}
    for each in content:
        match each:
            case {"name": str(name), "template": str(source)} if _NAME.fullmatch(name):
                sources[name] = source
            case _:
                raise DataError(
                    f"{path}: chat_template has {each!r:.80}, not a text or a list of objects with "
                    "the name of a file and a template; copy the file again"
                )
    return sources


def _special_tokens(tokens: Mapping[str, Any]) -> dict[str, str]:
    contents = {}
    for name in _TOKENS:
        token: Any = tokens.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            contents[f"{name}_token"] = token
    return contents


def _object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if there is no such file."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object; copy it again")
    return content
