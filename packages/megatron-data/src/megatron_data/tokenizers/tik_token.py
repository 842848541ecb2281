"""Megatron's JSON vocabularies of byte-level BPE, for the tiktoken library."""

import hashlib
import os
from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import orjson

from megatron_data.errors import DataError
from megatron_data.files import AtomicFile, tokenizer_path, write_json
from megatron_data.tokenizers.plain import PLAIN_FILE
from megatron_data.tokenizers.threads import may_use_threads

VOCABULARY_FILE = "tiktoken.json"
LARGEST = 1 << 17
"""Largest default size of a vocabulary, as in Megatron."""
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")

Pattern: TypeAlias = Literal["v1", "v2"]

_BEFORE = r"[^\r\n\p{L}\p{N}]"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS: dict[str, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"{_BEFORE}?[{_UPPER}]*[{_LOWER}]+|{_BEFORE}?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Regular expressions that split text into words."""


class TikTokenizer:
    """Megatron's `TikTokenizer` (the extra `tiktoken`).

    The first ids are those of the special tokens: the given ones, then `<SPECIAL_7>` and so on up
    to their number. Special tokens are recognized when spelled out in a text. `</s>` ends
    documents.

    Args:
        vocabulary: Content of the file: a JSON list of objects with `rank`, `token_bytes` (base64)
            and `token_str`, in the order of the ranks. The first 256 are the bytes.
        pattern: Regular expression that splits text into words, a key of `PATTERNS`.
        special_tokens: Megatron's seven special tokens and any others.
        num_special_tokens: Number of ids reserved for special tokens.
        vocab_size: Size of the vocabulary; a longer one is truncated. Defaults to the size of the
            file with the special tokens, at most 131,072.

    Raises:
        DataError: tiktoken is not installed, the vocabulary is invalid or too short, or the
            special tokens are not unique or are too many.
    """

    def __init__(
        self,
        vocabulary: bytes,
        *,
        pattern: Pattern = "v2",
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        num_special_tokens: int = 1000,
        vocab_size: int | None = None,
    ) -> None:
        if pattern not in PATTERNS:
            raise DataError(f"unknown pattern {pattern!r}; give one of {', '.join(PATTERNS)}")
        tokens = _tokens(vocabulary)
        whole = len(tokens) + num_special_tokens
        self._vocab_size = min(LARGEST, whole) if vocab_size is None else vocab_size
        names = _filled(special_tokens, num_special_tokens)
        if not 256 <= self._vocab_size - num_special_tokens <= len(tokens):
            raise DataError(
                f"{len(tokens)} tokens and {num_special_tokens} special tokens do not make a "
                f"vocabulary of {self._vocab_size}; give {256 + num_special_tokens} to {whole}"
            )
        del tokens[self._vocab_size - num_special_tokens :]
        self._file = vocabulary
        self._options: dict[str, Any] = {
            "pattern": pattern,
            "special_tokens": list(special_tokens),
            "num_special_tokens": num_special_tokens,
            "vocab_size": vocab_size,
        }
        self._numbers = {name: number for number, name in enumerate(names)}
        ranks = {token: number for number, token in enumerate(tokens, start=num_special_tokens)}
        self._encoding = _encoding(PATTERNS[pattern], ranks, self._numbers)
        digest = hashlib.sha256(orjson.dumps(["tiktoken", PATTERNS[pattern], names]))
        for token in tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        self._fingerprint = f"sha256:{digest.hexdigest()}"

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Reads a vocabulary file; the options are those of the class.

        Raises:
            DataError: The file is missing or is not a vocabulary; the message names the path.
        """
        path = tokenizer_path(path)
        if not path.is_file():
            raise DataError(f"no tokenizer file {path}")
        try:
            return cls(path.read_bytes(), **options)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""
        return self._vocab_size

    @property
    def eod_id(self) -> int | None:
        """The end-of-document token, `</s>`."""
        return self._numbers["</s>"]

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-text token, `<s>`."""
        return self._numbers["<s>"]

    @property
    def eos_id(self) -> int | None:
        """The end-of-text token, `</s>`."""
        return self._numbers["</s>"]

    @property
    def pad_id(self) -> int | None:
        """The padding token, `<pad>`."""
        return self._numbers["<pad>"]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the used tokens, the pattern and the special tokens."""
        return self._fingerprint

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, or None."""
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; special tokens spelled out in it are recognized."""
        ids: list[int] = self._encoding.encode(text, allowed_special="all")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of several texts, with several threads."""
        if not may_use_threads():
            return [self.encode(text) for text in texts]
        threads = os.cpu_count() or 1
        encoded: list[list[int]] = self._encoding.encode_batch(
            list(texts), num_threads=threads, allowed_special="all"
        )
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, with special tokens spelled out.

        Invalid UTF-8 becomes U+FFFD. Megatron decodes every token by itself, which loses
        characters that span several tokens.

        Raises:
            DataError: A token id is out of range.
        """
        numbers = [int(token) for token in tokens]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            wrong = max(numbers) if max(numbers) >= self.vocab_size else min(numbers)
            raise DataError(
                f"token {wrong} is out of range; token ids are 0 to {self.vocab_size - 1}"
            )
        return str(self._encoding.decode(numbers))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the vocabulary and the file from which `load_tokenizer` builds this tokenizer."""
        with AtomicFile(Path(folder) / VOCABULARY_FILE) as file:
            file.write(self._file)
        content = {"type": "TikTokenizer", "options": self._options}
        write_json(Path(folder) / PLAIN_FILE, content)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._options), (self._file,)


def _encoding(pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int]) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise DataError(
            "tiktoken is not installed; pip install 'megatron-data[tiktoken]'"
        ) from None
    return tiktoken.Encoding(
        "megatron-data", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
    )


def _filled(named: Sequence[str], count: int) -> list[str]:
    """Returns `count` special tokens: the given ones, then fillers."""
    if missing := [name for name in SPECIAL_TOKENS if name not in named]:
        raise DataError(f"the special tokens lack {missing[0]}; give {', '.join(SPECIAL_TOKENS)}")
    names = [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), count))]
    if len(names) != count:
        raise DataError(
            f"{len(named)} special tokens are given, but num_special_tokens is {count}; raise it"
        )
    name, times = max(Counter(names).items(), key=lambda item: item[1])
    if times > 1:
        raise DataError(f"the special token {name} is given {times} times; give it once")
    return names


def _tokens(content: bytes) -> list[bytes]:
    """Parses a vocabulary file; returns its tokens in the order of their ranks."""
    try:
        entries = orjson.loads(content)
    except ValueError as error:
        raise DataError(f"this is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise DataError("this is not a JSON list of tokens")
    tokens: list[bytes] = []
    for number, entry in enumerate(entries):
        match entry:
            case {"rank": int(rank), "token_bytes": str(text)} if rank == number:
                pass
            case _:
                raise DataError(
                    f"entry {number} lacks rank {number} or token_bytes: {entry!r:.200}"
                )
        try:
            token = b64decode(text, validate=True)
        except ValueError:  # binascii.Error, or a plain ValueError for non-ASCII text
            raise DataError(f"entry {number}: {text!r:.200} is not base64") from None
        if number < 256 and token != bytes([number]):
            raise DataError(f"entry {number} is {token!r}; the first 256 are the bytes")
        tokens.append(token)
    if len(tokens) < 256:
        raise DataError(f"{len(tokens)} tokens; a vocabulary begins with the 256 bytes")
    if len(set(tokens)) < len(tokens):
        raise DataError("a token occurs twice")
    return tokens
