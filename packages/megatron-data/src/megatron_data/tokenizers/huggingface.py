"""Tokenizers from a `tokenizer.json` of the Hugging Face `tokenizers` library."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeAlias

import orjson
import tokenizers
from tokenizers import AddedToken

from megatron_data.errors import DataError
from megatron_data.files import AtomicFile, read_json, tokenizer_path, write_json
from megatron_data.tokenizers.protocol import CONFIG_FILE
from megatron_data.tokenizers.template_files import StoredTemplates
from megatron_data.tokenizers.text_splitting import SEGMENT_CHARACTERS, split_pattern, split_text

Offsets: TypeAlias = tuple[int, int]

TOKENIZER_FILE = "tokenizer.json"
SEGMENTS_AT_ONCE = 16
_CANNOT_ENCODE = "the tokenizer cannot encode this text"
ROLES = ("eod", "bos", "eos", "pad")
_BASE = "megatron_base_fingerprint"  # a key of tokenizer_config.json in an extended tokenizer

# End-of-document tokens of published tokenizers, the most specific first. They are tried if
# neither the caller nor tokenizer_config.json names a token.
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class HuggingFaceTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library.

    The end-of-document token is `special_tokens["eod"]`, else the `eos_token` of
    `tokenizer_config.json`, else the first of `<|endoftext|>`, `<|end_of_text|>`, `</s>` and
    `<eos>` in the vocabulary.

    Attributes:
        templates: The chat templates in its folder.

    Args:
        definition: Content of a `tokenizer.json`. Its truncation and padding are ignored, because
            they would cut documents.
        special_tokens: Tokens by role: "eod", "bos", "eos" and "pad".

    Raises:
        DataError: The definition is invalid, or a special token is not in the vocabulary.
    """

    def __init__(
        self, definition: bytes | str, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        with _library_errors("this is not the definition of a tokenizer"):
            content: dict[str, Any] = orjson.loads(definition)
            content.pop("truncation", None)
            content.pop("padding", None)
            self._tokenizer = tokenizers.Tokenizer.from_str(orjson.dumps(content).decode())
            self._split_pattern = split_pattern(content)
        self._definition = bytes(definition, "utf-8") if isinstance(definition, str) else definition
        canonical = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
        self._fingerprint = f"sha256:{hashlib.sha256(canonical).hexdigest()}"
        self._base_fingerprint = self._fingerprint
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._special_tokens = dict(special_tokens or {})
        self._ids = {role: self._special_id(role) for role in ROLES}
        self.templates = StoredTemplates()

    def _special_id(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        if token is not None:
            number = self._tokenizer.token_to_id(token)
            if number is None:
                raise DataError(f"the {role} token {token!r} is not in the tokenizer's vocabulary")
            return number
        if role == "eod":
            names = [*filter(None, [self._special_tokens.get("eos")]), *_END_OF_DOCUMENT]
            found = (self._tokenizer.token_to_id(name) for name in names)
            return next((number for number in found if number is not None), None)
        return None

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], special_tokens: Mapping[str, str] | None = None
    ) -> Self:
        """Reads a `tokenizer.json`, or a folder with one and optionally `tokenizer_config.json`.

        Raises:
            DataError: The file is missing or is not a tokenizer; the message names the path.
        """
        path = tokenizer_path(path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"no tokenizer at {path}: {file} does not exist; give a tokenizer.json or its "
                "folder (nothing is downloaded)"
            )
        roles = _configured_roles(file.with_name(CONFIG_FILE)) | dict(special_tokens or {})
        try:
            loaded = cls(file.read_bytes(), roles)
        except DataError as error:
            raise DataError(f"{file}: {error}") from None
        loaded._base_fingerprint = _configured_base(file.with_name(CONFIG_FILE)) or (
            loaded._fingerprint
        )
        loaded.templates = StoredTemplates.read(file.parent)
        return loaded

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one, including added tokens."""
        return self._vocab_size

    @property
    def eod_id(self) -> int | None:
        """The end-of-document token, or None."""
        return self._ids["eod"]

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-text token, or None."""
        return self._ids["bos"]

    @property
    def eos_id(self) -> int | None:
        """The end-of-text token, or None."""
        return self._ids["eos"]

    @property
    def pad_id(self) -> int | None:
        """The padding token, or None."""
        return self._ids["pad"]

    @property
    def added_tokens(self) -> dict[str, int]:
        """The tokens that are recognized anywhere in a text, with their ids."""
        decoder = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in decoder.items()}

    @property
    def text_edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that the post-processor adds before and after a text, which `encode` omits."""
        probe = self._tokenizer.encode("a", add_special_tokens=True)
        text = [at for at, special in enumerate(probe.special_tokens_mask) if not special]
        if not text:  # the tokenizer has no token for the probe
            return (), ()
        return tuple(probe.ids[: text[0]]), tuple(probe.ids[text[-1] + 1 :])

    @property
    def definition(self) -> bytes:
        """The content of the `tokenizer.json`."""
        return self._definition

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the definition with sorted keys, without truncation and padding."""
        return self._fingerprint

    @property
    def base_fingerprint(self) -> str:
        """The fingerprint of the tokenizer that `with_special_tokens` extended, or its own."""
        return self._base_fingerprint

    def with_special_tokens(self, names: Sequence[str]) -> "HuggingFaceTokenizer":
        """Returns this tokenizer with added special tokens, such as those of FIM.

        New tokens take the ids after the vocabulary; existing tokens keep their ids.

        Raises:
            DataError: A token is empty.
        """
        if "" in names:
            raise DataError(f"special tokens {list(names)}: one of them is empty; leave it out")
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
        extended = HuggingFaceTokenizer(tokenizer.to_str(), self._special_tokens)
        extended._base_fingerprint = self._base_fingerprint
        extended.templates = self.templates
        return extended

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token as spelled in the vocabulary, or None."""
        return self._tokenizer.token_to_id(token)

    def token(self, number: int) -> str | None:
        """Returns the spelling of a token in the vocabulary, or None for an unused id."""
        return self._tokenizer.id_to_token(number)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; special tokens spelled out in it are recognized."""
        with _library_errors(_CANNOT_ENCODE):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of several texts, with the threads of the `tokenizers` library.

        A long text is encoded in segments (`split_text`), which gives the same tokens with less
        memory.
        """
        if self._split_pattern is not None and any(
            len(text) > 2 * SEGMENT_CHARACTERS for text in texts
        ):
            return [self._encode_long(text) for text in texts]
        return self._encode_all(texts)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Offsets]]]:
        """Returns for each text its token ids and the first character and end of each token."""
        with _library_errors(_CANNOT_ENCODE):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def split_text(self, text: str) -> Iterator[str]:
        """Splits a text at points where its tokens do not change, or yields it whole."""
        if self._split_pattern is None:
            return iter((text,))
        return split_text(text, SEGMENT_CHARACTERS, self._split_pattern)

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        with _library_errors(_CANNOT_ENCODE):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _encode_long(self, text: str) -> list[int]:
        rest, ids = self.split_text(text), list[int]()
        while some := list(islice(rest, SEGMENTS_AT_ONCE)):
            for segment_ids in self._encode_all(some):
                ids += segment_ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, with special tokens spelled out."""
        with _library_errors("these are not tokens of this tokenizer"):
            return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` as it was read, `tokenizer_config.json` and chat templates."""
        folder = Path(folder)
        with AtomicFile(folder / TOKENIZER_FILE) as file:
            file.write(self._definition)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.templates.variables}
        config |= {f"{role}_token": token for role, token in self._special_tokens.items()}
        if self._base_fingerprint != self._fingerprint:
            config[_BASE] = self._base_fingerprint
        write_json(folder / CONFIG_FILE, config)
        self.templates.save(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"_base_fingerprint": self._base_fingerprint, "templates": self.templates}
        return type(self), (self._definition, self._special_tokens), state


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Converts errors and panics of the library to `DataError`.

    The library raises plain `Exception`. A panic of Rust is an exception of pyo3 that does not
    derive from `Exception` and whose class cannot be imported.
    """
    try:
        yield
    except MemoryError:  # not an error of the text
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{what}: {error}") from None
        raise


def _configured_base(path: Path) -> str | None:
    """Reads the fingerprint of the tokenizer that a saved one extends, or returns None."""
    config = read_json(path) if path.is_file() else {}
    found = config.get(_BASE)
    return found if isinstance(found, str) else None


def _configured_roles(path: Path) -> dict[str, str]:
    """Reads the special tokens by role from a `tokenizer_config.json`, if it exists."""
    if not path.is_file():
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise DataError(f"{path} is not a JSON object; copy it again, or remove it")
    roles = {}
    for role in ROLES:
        token = config.get(f"{role}_token")
        if isinstance(token, dict):  # a serialised AddedToken
            token = token.get("content")
        if token is not None and not isinstance(token, str):
            raise DataError(f"{path}: {role}_token is {token!r}, not a string")
        if token:
            roles[role] = token
    return roles
