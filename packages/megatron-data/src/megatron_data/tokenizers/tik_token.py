"""Megatron's JSON vocabularies of byte-level BPE, which the tiktoken library encodes with."""

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
"""Tokens of a vocabulary of which nobody says how large it is, as in Megatron, if it has them."""
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")

Pattern: TypeAlias = Literal["v1", "v2"]

_BEFORE = r"[^\r\n\p{L}\p{N}]"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS: dict[str, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"{_BEFORE}?[{_UPPER}]*[{_LOWER}]+|{_BEFORE}?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""What a text is cut into words by."""


class TikTokenizer:
    """Megatron's tokenizer of that name (the extra `tiktoken`).

    Special tokens come first: those named, and `<SPECIAL_7>` and so on up to their number. One that
    is spelled out in a text becomes that token; `</s>` ends documents.

    Args:
        vocabulary: content of the file, a JSON list of objects with `rank`, `token_bytes` (base64)
            and `token_str`, in the order of their ranks, of which the first 256 are the bytes.
        pattern: how texts are cut into words.
        special_tokens: the seven of Megatron and any others.
        num_special_tokens: numbers that special tokens take.
        vocab_size: tokens in all; a longer vocabulary is cut. None takes what there is, at most
            131,072.

    Raises:
        DataError: tiktoken is not installed, the vocabulary is none or too short, or the special
            tokens are not unique or do not fit.
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
            raise DataError(f"pattern {pattern!r}; known are {', '.join(PATTERNS)}")
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
            DataError: no such file, or not a vocabulary; the message names the path.
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
        """One more than the largest token number."""
        return self._vocab_size

    @property
    def eod_id(self) -> int | None:
        """Token that ends a document, `</s>`."""
        return self._numbers["</s>"]

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text, `<s>`."""
        return self._numbers["<s>"]

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text, `</s>`."""
        return self._numbers["</s>"]

    @property
    def pad_id(self) -> int | None:
        """Token that fills a batch, `<pad>`."""
        return self._numbers["<pad>"]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens in use, the pattern and the special tokens."""
        return self._fingerprint

    def token_id(self, token: str) -> int | None:
        """Returns the number of a token, or None."""
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text. A special token spelled out in the text becomes that token."""
        ids: list[int] = self._encoding.encode(text, allowed_special="all")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, in threads."""
        if not may_use_threads():
            return [self.encode(text) for text in texts]
        threads = os.cpu_count() or 1
        encoded: list[list[int]] = self._encoding.encode_batch(
            list(texts), num_threads=threads, allowed_special="all"
        )
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token numbers, special tokens spelled out; bytes that are no text give U+FFFD.

        Megatron decodes every token by itself, which loses characters of several tokens.

        Raises:
            DataError: a number that is no token.
        """
        numbers = [int(token) for token in tokens]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            wrong = max(numbers) if max(numbers) >= self.vocab_size else min(numbers)
            raise DataError(f"token {wrong} is not in 0 to {self.vocab_size - 1}")
        return str(self._encoding.decode(numbers))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the vocabulary, and the file by which `load_tokenizer` knows this tokenizer."""
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
    """Returns the special tokens: those that are named, and fillers up to their number."""
    if missing := [name for name in SPECIAL_TOKENS if name not in named]:
        raise DataError(f"the special tokens lack {missing[0]}; name {', '.join(SPECIAL_TOKENS)}")
    names = [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), count))]
    if len(names) != count:
        raise DataError(f"{len(named)} special tokens are named, there is room for {count}")
    (name, times), *_ = Counter(names).most_common(1)
    if times > 1:
        raise DataError(f"the special token {name} is named {times} times")
    return names


def _tokens(content: bytes) -> list[bytes]:
    """Returns the tokens of a vocabulary file in the order of their ranks."""
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
                    f"entry {number} has not rank {number} and token_bytes: {entry!r:.200}"
                )
        try:
            token = b64decode(text, validate=True)
        except ValueError:  # binascii.Error is one; text that is not ASCII raises a plain one
            raise DataError(f"entry {number}: {text!r:.200} is not base64") from None
        if number < 256 and token != bytes([number]):
            raise DataError(f"entry {number} is {token!r}; the first 256 are the bytes")
        tokens.append(token)
    if len(tokens) < 256:
        raise DataError(f"{len(tokens)} tokens; a vocabulary begins with those of the 256 bytes")
    if len(set(tokens)) < len(tokens):
        raise DataError("a token occurs twice")
    return tokens
