"""The map from documents to source chunks, compared with a list of every document's origin."""

import dataclasses
import json
import random

import pytest
from megatron_data import DataError
from megatron_data.preprocessing.origins import Origins
from megatron_data.preprocessing.parts import PartRecord
from megatron_data.sources.protocol import Fault, Span


def record(number, documents):
    return PartRecord(
        source=number % 3,
        path=f"text{number}",
        span=Span(10 * number, 7 + number, number, 2),
        digest=f"{number:02d}" + "0123456789abcdef" * 2,
        stored=5,
        documents=documents,
        sequences=[documents],
        tokens=[documents * 2],
        faults=[Fault(*(f"x{i}" for i, _ in enumerate(Fault._fields)))],
        refused=[number],
        sha256="e" * 64,
        tallies={"images": number},
        others="v1",
    )


def made(*documents, tokens_per_document=3):
    origins = Origins()
    for number, count in enumerate(documents):
        origins.add(record(number, count), count * tokens_per_document)
    return origins


def by_document(origins):
    """Returns source, range and index in the chunk of every document."""
    found = []
    for document in range(origins.documents):
        origin = origins.find(document)
        index = document - origin.document + origin.skip
        found.append((origin.source, origin.span, origin.digest, tuple(origin.refused), index))
    return found


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(PartRecord)])
def test_every_field_of_a_record_is_read_back(name):
    one, other = record(3, 4), record(8, 9)
    changed = dataclasses.replace(one, **{name: getattr(other, name)})
    changed = dataclasses.replace(changed, **({"others": "v2"} if name == "others" else {}))
    assert PartRecord.from_json(json.dumps(dataclasses.asdict(changed)).encode()) == changed


def test_documents_have_the_chunks_that_were_added():
    origins = made(2, 0, 3, 1)
    assert (origins.documents, origins.tokens) == (6, 18)
    assert [(source, index) for source, _, _, _, index in by_document(origins)] == [
        *((0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (0, 0)),
    ]
    first = origins.find(0)
    assert first.span == Span(0, 7, 0, 2) and first.digest == "000123456789abcd"
    assert first.refused == [0] and (first.document, first.token) == (0, 0)
    assert (origins.find(4).document, origins.find(4).token) == (2, 6)


def test_a_map_is_read_back():
    origins = made(2, 3, 1)
    assert Origins.from_json(origins.to_json(), 6, 18) == origins
    assert Origins.from_json(Origins().to_json(), 0, 0) == Origins()


@pytest.mark.parametrize("name", ["source", "offset", "size", "first", "units", "skip", "digest"])
def test_columns_of_other_lengths_and_types_are_refused(name):
    whole = made(2, 3).to_json()
    for column in (whole[name][:-1], "text", None, [*whole[name][:-1], 1.5]):
        with pytest.raises(DataError, match="its map of chunks is damaged"):
            Origins.from_json({**whole, name: column}, 5, 15)


@pytest.mark.parametrize(
    ("document", "documents", "token", "tokens", "valid"),
    [
        ([0, 2], 5, [0, 6], 15, True),
        ([0, 2], 3, [0, 6], 6, True),  # chunks may be without tokens, not without documents
        ([0, 2], 2, [0, 6], 15, False),
        ([0, 0], 5, [0, 6], 15, False),
        ([0, 2], 5, [0, 0], 15, True),
        ([0, 2], 5, [6, 0], 15, False),
        ([0, 2], 5, [0, 6], 5, False),
        ([0, 2], 5.0, [0, 6], 15, False),
        ([0, 2], 5, [0, 6], True, False),
    ],
)
def test_documents_and_tokens_are_in_order(document, documents, token, tokens, valid):
    content = {**made(2, 3).to_json(), "document": document, "token": token}
    if valid:
        assert Origins.from_json(content, documents, tokens).documents == documents
        return
    with pytest.raises(DataError, match="preprocess the text again"):
        Origins.from_json(content, documents, tokens)


@pytest.mark.parametrize("refused", [None, [], {"0": 1}])
def test_refused_documents_are_lists_by_row(refused):
    with pytest.raises(DataError, match="its map of chunks is damaged"):
        Origins.from_json({**made(2, 3).to_json(), "refused": refused}, 5, 15)


def test_parts_of_a_map_and_joined_maps_have_the_same_documents():
    draw = random.Random(0)
    for _ in range(40):
        origins = made(*(draw.randrange(4) for _ in range(5)))
        first, last = sorted(draw.randrange(origins.documents + 1) for _ in range(2))
        part = origins.select(first, last, 3 * first, 3 * last)
        assert (part.documents, part.tokens) == (last - first, 3 * (last - first))
        assert by_document(part) == by_document(origins)[first:last]
        again = Origins.from_json(part.to_json(), part.documents, part.tokens)
        assert by_document(again) == by_document(part)
        joined = Origins.concatenate([(part, 10), (origins, 0)])
        moved = [(source + 10, *rest) for source, *rest in by_document(part)]
        assert by_document(joined) == [*moved, *by_document(origins)]
        assert joined.tokens == part.tokens + origins.tokens
