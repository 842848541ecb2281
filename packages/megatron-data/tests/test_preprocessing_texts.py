"""The encoder of texts and the pool of workers alone, with tokens by hand."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron_data import DataError
from megatron_data.preprocessing import batches, encoding, pool
from megatron_data.preprocessing.encoding import TextEncoder
from megatron_data.preprocessing.pool import ordered_map
from megatron_data.sources.protocol import Fault, Item

FAULT = Fault("a:1", "json", "why", "a", 1)


class Letters:
    """Tokens are the places of letters in the alphabet; "x" is refused."""

    vocab_size, eod_id, fingerprint = 30, 29, "letters"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any("x" in text for text in texts):
            raise DataError("no x")
        return [[ord(letter) - ord("a") for letter in text] for text in texts]


class JoinedLetters(Letters):
    def encode_joined(self, texts: Sequence[str]) -> tuple[Any, Any]:
        encoded = self.encode_batch(texts)
        tokens = np.array([token for ids in encoded for token in ids], np.int64)
        return tokens, np.array([len(ids) for ids in encoded], np.int64)


class CutLetters(Letters):
    def split_text(self, text: str) -> Iterator[str]:
        yield from text


class Bars:
    @property
    def record(self) -> dict[str, Any]:
        return {"splitter": "bars"}

    def split(self, text: str) -> list[str]:
        return text.split("|")


class Texts:
    """A chunk of documents and faults."""

    def __init__(self, found: Sequence[Any]) -> None:
        self._found = found

    def items(self, keys: tuple[str, ...], max_bytes: int | None) -> Iterator[Any]:
        assert max_bytes == 99
        for number, texts in enumerate(self._found):
            yield texts if isinstance(texts, Fault) else Item(number, None, 1, texts)

    def fault(self, item: Item, kind: str, reason: str) -> Fault:
        return Fault(f"a:{item.number}", kind, reason, "a", item.number)


@pytest.mark.parametrize("tokenizer", [Letters(), JoinedLetters(), CutLetters()])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_every_document_with_tokens_has_one_end(
    tokenizer: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several strings are sentences already; sentences without tokens are left out."""
    for module in (batches, encoding):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
    documents = [["ab"], [""], ["c", "", "d|e"], ["f|g"], ["|h|"], []]
    for append, tokens, lengths in (
        (
            True,
            [0, 1, 29, 2, 3, 27, 4, 29, 5, 6, 29, 7, 29],
            [3, 1, 4, 1, 2, 2],
        ),
        (False, [0, 1, 2, 3, 27, 4, 5, 6, 7], [2, 1, 3, 1, 1, 1]),
    ):
        encoder = TextEncoder(tokenizer, ("text",), append, 99, Bars())
        (output,) = encoder(Texts([[texts] for texts in documents])).outputs  # type: ignore[arg-type]
        assert output.tokens.tolist() == tokens and output.tokens.dtype == np.uint16
        assert output.lengths.tolist() == lengths
        assert output.sequences.tolist() == [1, 0, 2, 2, 1, 0]
        assert encoder.options(0)["append_eod"] is append
    assert [output.suffix for output in encoder.outputs] == ["_text_sentence"]
    whole = TextEncoder(tokenizer, ("a", "b"), True)
    assert [output.suffix for output in whole.outputs] == ["_a_document", "_b_document"]


@pytest.mark.parametrize("tokenizer", [Letters(), JoinedLetters()])
@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_refused_documents_are_numbered_among_those_that_were_read(
    tokenizer: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "AT_ONCE", at_once)
    pairs = [("a", "b"), ("x", "c"), ("d", ""), ("e", "x"), ("", "f")]
    found: list[Any] = [[[one], [other]] for one, other in pairs]
    found.insert(3, FAULT)
    made = TextEncoder(tokenizer, ("one", "other"), False, 99)(Texts(found))  # type: ignore[arg-type]
    assert made.refused == [1, 3]
    assert [fault.location for fault in made.faults] == ["a:1", "a:1", "a:4"]
    assert [fault.kind for fault in made.faults] == ["tokens", "json", "tokens"]
    assert [output.tokens.tolist() for output in made.outputs] == [[0, 3], [1, 5]]
    assert [output.sequences.tolist() for output in made.outputs] == [[1, 1, 0], [1, 0, 1]]
    nothing = TextEncoder(tokenizer, ("one",), False, 99)(Texts([FAULT]))  # type: ignore[arg-type]
    assert nothing.outputs[0].tokens.dtype == np.uint16
    assert [len(array) for array in nothing.outputs[0].arrays] == [0, 0, 0]


def test_an_end_needs_a_token() -> None:
    class Endless(Letters):
        eod_id = None

    with pytest.raises(DataError, match="--append-eod: this tokenizer has no end-of-document"):
        TextEncoder(Endless(), ("text",), True)  # type: ignore[arg-type]
    assert TextEncoder(Endless(), ("text",), False).eod == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "most"), [(2, 6), (3, 9)])
def test_at_most_three_items_for_each_worker_are_read_ahead(
    monkeypatch: pytest.MonkeyPatch, workers: int, most: int
) -> None:
    closed = []

    class Worker:
        def __init__(self, function: Any) -> None:
            self._function = function

        def __call__(self, item: Any) -> Any:
            return self._function(item)

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(pool, "_Worker", Worker)
    monkeypatch.setattr(pool, "resource_tracker", SimpleNamespace(ensure_running=list))
    seen: list[int] = []

    def items() -> Iterator[int]:
        for number in range(12):
            seen.append(number)
            yield number

    results = ordered_map(str, items(), workers)
    read = [(next(results), len(seen)) for _ in range(12)]
    assert read == [(str(number), min(most + number, 12)) for number in range(12)]
    assert closed == [] and next(results, None) is None
    assert len(set(closed)) == len(closed) == workers
    results = ordered_map(str, items(), workers)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(set(closed)) == len(closed) == 2 * workers


def test_a_long_text_is_encoded_in_groups_of_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[list[str]] = []

    class Watched(CutLetters):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            groups.append([*texts])
            return super().encode_batch(texts)

    monkeypatch.setattr(encoding, "AT_ONCE", 3)
    for texts, expected in (
        (["abcd", "e"], [["a", "b", "c"], ["d"], ["e"]]),
        (["abc", "e"], [["abc", "e"]]),  # none is longer than the limit
    ):
        groups.clear()
        (made,) = TextEncoder(Watched(), ("text",), False, 99)(Texts([[texts]])).outputs  # type: ignore[arg-type]
        assert groups == expected
        assert made.lengths.tolist() == [len(text) for text in texts]
