"""The map from documents of a dataset to their sources, which a manifest holds."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from megatron_data.errors import DataError
from megatron_data.preprocessing.parts import PartRecord
from megatron_data.sources.protocol import Span

DIGEST_DIGITS = 16

_NUMBERS = ("source", "offset", "size", "first", "units", "skip", "document", "token")
_COLUMNS = (*_NUMBERS, "digest")


@dataclass(frozen=True)
class Origin:
    """A source chunk and its documents in a dataset.

    Attributes:
        source: Index of the source in the manifest.
        span: The range of the source.
        skip: Documents of the chunk before the first of this dataset, which another dataset holds.
        document: Index of the first document in this dataset.
        token: Index of its first token in this dataset.
        digest: The first digits of the SHA-256 of the chunk.
        refused: Indices of the documents of the chunk that the encoder refused.
    """

    source: int
    span: Span
    skip: int
    document: int
    token: int
    digest: str
    refused: list[int]


@dataclass
class Origins:
    """Source chunks in the order of the dataset, as columns of equal length; see `Origin`."""

    source: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    skip: list[int] = field(default_factory=list)
    document: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    digest: list[str] = field(default_factory=list)
    refused: dict[str, list[int]] = field(default_factory=dict)
    documents: int = 0
    tokens: int = 0

    @classmethod
    def from_json(cls, content: dict[str, Any], documents: int, tokens: int) -> "Origins":
        """Reads the result of `to_json`.

        Raises:
            DataError: The columns are inconsistent.
        """
        columns = [content.get(name) for name in _COLUMNS]
        refused = content.get("refused")
        in_order = (
            type(documents) is type(tokens) is int
            and all(isinstance(column, list) for column in columns)
            and len({len(column) for column in columns if column is not None}) == 1
            and all(type(value) is int for column in columns[:-1] for value in column or ())
            and all(isinstance(value, str) for value in columns[-1] or ())
            and isinstance(refused, dict)
            and all(isinstance(value, list) for value in refused.values())
            and _is_increasing([*content["document"], documents], least=1)
            and _is_increasing([*content["token"], tokens], least=0)
        )
        if not in_order:
            raise DataError("its map of chunks is damaged; preprocess the text again")
        known = {name: content[name] for name in (*_COLUMNS, "refused")}
        return cls(**known, documents=documents, tokens=tokens)

    def to_json(self) -> dict[str, Any]:
        """Returns the columns as JSON values."""
        content = asdict(self)
        del content["documents"], content["tokens"]
        return content

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> Origin:
        span = Span(self.offset[row], self.size[row], self.first[row], self.units[row])
        return Origin(
            self.source[row],
            span,
            self.skip[row],
            self.document[row],
            self.token[row],
            self.digest[row],
            self.refused.get(str(row), []),
        )

    def add(self, record: PartRecord, tokens: int) -> None:
        """Appends a preprocessed chunk."""
        digest = record.digest[:DIGEST_DIGITS]
        origin = Origin(record.source, record.span, 0, 0, 0, digest, record.refused)
        self._append(origin, 0, record.documents, tokens)

    def find(self, document: int) -> Origin:
        """Returns the source chunk of a document."""
        return self[bisect_right(self.document, document) - 1]

    def select(self, first: int, last: int, token: int, last_token: int) -> "Origins":
        """Returns the map of the documents from `first` to `last`, whose tokens are the given ones.

        Args:
            first: Index of the first document.
            last: Index of the document after the last one.
            token: Index of the first token.
            last_token: Index of the token after the last one.
        """
        made = Origins()
        for origin, end, token_end in self._until():
            low, high = max(first, origin.document), min(last, end)
            if low < high:
                tokens = min(last_token, token_end) - max(token, origin.token)
                made._append(origin, low - origin.document, high - low, tokens)
        return made

    @classmethod
    def concatenate(cls, parts: Iterable[tuple["Origins", int]]) -> "Origins":
        """Concatenates maps, each given with the new index of its first source."""
        made = cls()
        for part, source in parts:
            for origin, end, token_end in part._until():
                origin = replace(origin, source=origin.source + source)
                made._append(origin, 0, end - origin.document, token_end - origin.token)
        return made

    def _until(self) -> Iterator[tuple[Origin, int, int]]:
        """Yields each source chunk with the indices of the document and token after it."""
        ends = [*self.document[1:], self.documents], [*self.token[1:], self.tokens]
        for row in range(len(self)):
            yield self[row], ends[0][row], ends[1][row]

    def _append(self, origin: Origin, skip: int, documents: int, tokens: int) -> None:
        """Appends `documents` documents of a source chunk, after skipping `skip` more of it."""
        if not documents:
            return
        if origin.refused:
            self.refused[str(len(self))] = origin.refused
        self.source.append(origin.source)
        self.offset.append(origin.span.offset)
        self.size.append(origin.span.size)
        self.first.append(origin.span.first)
        self.units.append(origin.span.units)
        self.skip.append(origin.skip + skip)
        self.document.append(self.documents)
        self.token.append(self.tokens)
        self.digest.append(origin.digest)
        self.documents += documents
        self.tokens += tokens


def _is_increasing(starts: list[int], least: int) -> bool:
    """Returns whether the starts begin at 0 and increase by at least `least`."""
    return starts[0] == 0 and all(end - start >= least for start, end in pairwise(starts))
