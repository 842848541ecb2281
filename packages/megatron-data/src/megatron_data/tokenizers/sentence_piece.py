"""A `tokenizer.model` of the sentencepiece library."""

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
    """The pieces of a sentencepiece model (the extra `sentencepiece`).

    With neither option it is the model alone, Megatron's `GPTSentencePieceTokenizer`, and so every
    one of megatron-core's own sentencepiece tokenizers; the model's end of a text ends documents.

    Args:
        model: content of the file.
        added_tokens: Megatron's `SentencePieceTokenizer`, which puts behind the model's pieces what
            it lacks of <CLS>, <SEP>, <EOD>, <MASK>, a padding, a begin and an end of a text
            (`<PAD>`, `<BOS>`, `<EOS>` where the model has none) and T5's sentinels. A token of
            these that is spelled out in a text becomes that token; <EOD> ends documents.
        extra_ids: number of sentinels `<extra_id_0>` and so on (Megatron: `--vocab-extra-ids`),
            with `added_tokens`.
        special_tokens: further tokens, behind the sentinels, with `added_tokens`.
        begin: Megatron's `Llama2Tokenizer`: every text begins with the model's begin of a text.

    Raises:
        DataError: sentencepiece is not installed, the model is none, or lacks the begin that
            every text is to have.
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
            raise DataError(f"{extra_ids} extra ids; give at least 0")
        if (extra_ids or special_tokens) and not added_tokens:
            raise DataError("a sentencepiece model gets further tokens with added_tokens alone")
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
            raise DataError("the sentencepiece model has no token that begins a text")
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
        # At one place of the text the token that was added first wins.
        self._spelled = re.compile("|".join(map(re.escape, self._added))) if self._added else None
        content = orjson.dumps(self._options, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(b"sentencepiece\0" + content + b"\0" + model).hexdigest()
        self._fingerprint = f"sha256:{digest}"

    def _add(self, name: str) -> int:
        """Returns the number of a token, a new one if the model does not have it."""
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
            DataError: no such file, or not a model; the message names the path.
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
        """One more than the largest token number, added tokens included."""
        return self._pieces + len(self._new)

    @property
    def eod_id(self) -> int | None:
        """Token that ends a document, or None."""
        return self._ids["eod"]

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text, or None."""
        return self._ids["bos"]

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text, or None."""
        return self._ids["eos"]

    @property
    def pad_id(self) -> int | None:
        """Token that fills a batch, or None."""
        return self._ids["pad"]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the model and the options."""
        return self._fingerprint

    def token_id(self, token: str) -> int | None:
        """Returns the number of a token as the model spells it, or None."""
        if token in self._added:
            return self._added[token]
        number: int = self._processor.piece_to_id(token)
        known = number != self._processor.unk_id() or self._processor.id_to_piece(number) == token
        return number if known else None

    def token(self, number: int) -> str | None:
        """Returns the spelling of a token, or None for a number that is none."""
        if 0 <= number < self._pieces:
            return str(self._processor.id_to_piece(number))
        return self._new[number - self._pieces] if 0 <= number < self.vocab_size else None

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text; with `begin`, the begin of a text first."""
        ids: list[int] = []
        for part in self._parts(text):
            ids += [part] if isinstance(part, int) else self._processor.encode(part)
        return self._begun(ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, in the threads of the library."""
        if self._spelled is not None and any(map(self._spelled.search, texts)):
            return [self.encode(text) for text in texts]
        threads = -1 if may_use_threads() else 1  # -1: as many as there are cores
        encoded = self._processor.encode(list(texts), num_threads=threads)
        return [self._begun(ids) for ids in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token numbers, special tokens spelled out but for a begin that `encode` adds.

        Raises:
            DataError: a number that is no token.
        """
        numbers = [int(token) for token in tokens]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            wrong = max(numbers) if max(numbers) >= self.vocab_size else min(numbers)
            raise DataError(f"token {wrong} is not in 0 to {self.vocab_size - 1}")
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
        """Writes the model, and the file by which `load_tokenizer` knows this tokenizer."""
        with AtomicFile(Path(folder) / MODEL_FILE) as file:
            file.write(self._model)
        content = {"type": "SentencePieceTokenizer", "options": self._options}
        write_json(Path(folder) / PLAIN_FILE, content)

    def _parts(self, text: str) -> Iterator[str | int]:
        """Text between spelled out tokens, and the numbers of these."""
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
    if not model:  # the library takes it, and fails when it is used
        raise DataError("this is not a sentencepiece model: it is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    # The library raises RuntimeError and others, by the version of it.
    except Exception as error:  # noqa: BLE001
        raise DataError(f"this is not a sentencepiece model: {error}") from None
