"""Tokenizers from a `tokenizer.model` of the sentencepiece library."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import orjson

from megatron_data.errors import DataError
from megatron_data.files import AtomicFile, tokenizer_path, write_json
from megatron_data.tokenizers.plain import PLAIN_FILE
from megatron_data.tokenizers.threads import may_use_threads

MODEL_FILE = "tokenizer.model"
ADDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
END_OF_DOCUMENT = "<EOD>"


class SentencePieceTokenizer:
    """A sentencepiece model (the extra `sentencepiece`).

    Without options it is Megatron's `GPTSentencePieceTokenizer`, which equals the sentencepiece
    tokenizers of megatron-core; the end-of-text token of the model ends documents.

    Args:
        model: Content of the model file.
        added_tokens: Whether to build Megatron's `SentencePieceTokenizer`. It adds the tokens that
            the model lacks: <CLS>, <SEP>, <EOD>, <MASK>, padding, beginning and end of text
            (`<PAD>`, `<BOS>`, `<EOS>`) and T5's sentinel tokens. These tokens are recognized when
            spelled out in a text, and <EOD> ends documents.
        extra_ids: Number of sentinel tokens `<extra_id_0>`, `<extra_id_1>`, … (Megatron:
            `--vocab-extra-ids`). Needs `added_tokens`.
        special_tokens: Further special tokens, after the sentinel tokens. Needs `added_tokens`.
        begin: Whether to build Megatron's `Llama2Tokenizer`, which starts every text with the
            beginning-of-text token of the model.

    Raises:
        DataError: sentencepiece is not installed, the model is invalid, or it lacks the
            beginning-of-text token that `begin` needs.
    """

    def __init__(
        self,
        model: bytes,
        *,
        added_tokens: bool = False,
        extra_ids: int = 0,
        special_tokens: Sequence[str] = (),
        begin: bool = False,
    ) -> None:
        if extra_ids < 0:
            raise DataError(f"extra_ids={extra_ids}; give at least 0")
        if (extra_ids or special_tokens) and not added_tokens:
            raise DataError("extra_ids and special_tokens need added_tokens=True")
        self._processor = _processor(model)
        self._model = model
        self._options: dict[str, Any] = {
            "added_tokens": added_tokens,
            "extra_ids": extra_ids,
            "special_tokens": list(special_tokens),
            "begin": begin,
        }
        self._pieces: int = self._processor.get_piece_size()
        roles = {
            name: number if number >= 0 else None
            for name, number in (
                ("pad", self._processor.pad_id()),
                ("bos", self._processor.bos_id()),
                ("eos", self._processor.eos_id()),
            )
        }
        if begin and roles["bos"] is None:
            raise DataError("the sentencepiece model has no beginning-of-text token")
        self._added: dict[str, int] = {}
        self._new: list[str] = []
        if added_tokens:
            for name in ADDED:
                self._add(name)
            for role, number in roles.items():
                spelled = f"<{role.upper()}>" if number is None else self.token(number)
                roles[role] = self._add(str(spelled))
            for name in (*(f"<extra_id_{n}>" for n in range(extra_ids)), *special_tokens):
                self._add(name)
        self._ids = {**roles, "eod": self._added.get(END_OF_DOCUMENT, roles["eos"])}
        # If several tokens match at the same character, the one that was added first wins.
        self._spelled = re.compile("|".join(map(re.escape, self._added))) if self._added else None
        content = orjson.dumps(self._options, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(b"sentencepiece\0" + content + b"\0" + model).hexdigest()
        self._fingerprint = f"sha256:{digest}"

    def _add(self, name: str) -> int:
        """Returns the id of a token; adds the token if the model does not have it."""
        number = self.token_id(name)
        if number is None:
            number = self._pieces + len(self._new)
            self._new.append(name)
        self._added[name] = number
        return number

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Reads a model file; the options are those of the class.

        Raises:
            DataError: The file is missing or is not a model; the message names the path.
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
        """The largest token id plus one, including added tokens."""
        return self._pieces + len(self._new)

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
    def fingerprint(self) -> str:
        """SHA-256 of the model and the options."""
        return self._fingerprint

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token as spelled in the model, or None."""
        if token in self._added:
            return self._added[token]
        number: int = self._processor.piece_to_id(token)
        known = number != self._processor.unk_id() or self._processor.id_to_piece(number) == token
        return number if known else None

    def token(self, number: int) -> str | None:
        """Returns the spelling of a token, or None for an invalid id."""
        if 0 <= number < self._pieces:
            return str(self._processor.id_to_piece(number))
        index = number - self._pieces
        return self._new[index] if 0 <= index < len(self._new) else None

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; with `begin`, the beginning-of-text token is first."""
        ids: list[int] = []
        for part in self._parts(text):
            ids += [part] if isinstance(part, int) else self._processor.encode(part)
        return self._begun(ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of several texts, with the threads of the library."""
        if self._spelled is not None and any(map(self._spelled.search, texts)):
            return [self.encode(text) for text in texts]
        threads = -1 if may_use_threads() else 1  # -1: as many as there are cores
        encoded = self._processor.encode(list(texts), num_threads=threads)
        return [self._begun(ids) for ids in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, with special tokens spelled out.

        A beginning-of-text token that `encode` adds is left out.

        Raises:
            DataError: A token id is out of range.
        """
        numbers = [int(token) for token in tokens]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            wrong = max(numbers) if max(numbers) >= self.vocab_size else min(numbers)
            raise DataError(
                f"token {wrong} is out of range; token ids are 0 to {self.vocab_size - 1}"
            )
        if self._options["begin"] and numbers[:1] == [self.bos_id]:
            del numbers[0]
        text, plain = "", list[int]()
        for number in numbers:
            if number < self._pieces and not self._processor.is_control(number):
                plain.append(number)
                continue
            text += self._processor.decode(plain) + str(self.token(number))
            plain.clear()
        return text + str(self._processor.decode(plain))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model and the file from which `load_tokenizer` builds this tokenizer."""
        with AtomicFile(Path(folder) / MODEL_FILE) as file:
            file.write(self._model)
        content = {"type": "SentencePieceTokenizer", "options": self._options}
        write_json(Path(folder) / PLAIN_FILE, content)

    def _parts(self, text: str) -> Iterator[str | int]:
        """Yields the text between spelled-out tokens, and the ids of these tokens."""
        position = 0
        for found in self._spelled.finditer(text) if self._spelled else ():
            yield text[position : found.start()]
            yield self._added[found[0]]
            position = found.end()
        yield text[position:]

    def _begun(self, ids: list[int]) -> list[int]:
        begin = self.bos_id if self._options["begin"] else None
        return ids if begin is None else [begin, *ids]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._options), (self._model,)


def _processor(model: bytes) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise DataError(
            "sentencepiece is not installed; pip install 'megatron-data[sentencepiece]'"
        ) from None
    if not model:  # the library accepts an empty model and fails at its first use
        raise DataError("this is not a sentencepiece model: it is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    # The type of the exception depends on the version of the library.
    except Exception as error:  # noqa: BLE001
        raise DataError(f"this is not a sentencepiece model: {error}") from None
