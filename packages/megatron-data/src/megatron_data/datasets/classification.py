"""Samples of classification: one or two texts with a class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample
from megatron_data.datasets.build import Datasets
from megatron_data.datasets.labelled_texts import LabelledText
from megatron_data.datasets.padding import pad
from megatron_data.datasets.split import DEFAULT_SPLIT, parse_split, sequence_range
from megatron_data.datasets.split_names import SPLITS
from megatron_data.errors import DataError, EmptySplitError
from megatron_data.tokenizers.protocol import Tokenizer

_SPLIT_SEED = 0
"""Seed of the division of one table into splits, which is the same for every seed of a run."""


class TextFormat(NamedTuple):
    """The special tokens around texts.

    Attributes:
        begin: Tokens before the first text.
        between: Tokens between two texts.
        end: Tokens after the last text.
        segments: Whether the second text and the tokens after it have the token type 1.
        pad_id: Token after the end.
    """

    begin: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    segments: bool
    pad_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TextFormat":
        """Returns the format of the models that use a tokenizer.

        With [CLS] and [SEP] it is BERT's: [CLS] A [SEP] B [SEP]. With `<s>`, `</s>` and `<mask>` it
        is RoBERTa's: `<s> A </s></s> B </s>`. Otherwise each text ends with the end-of-document
        token, and a beginning-of-text token comes first if there is one.

        Raises:
            DataError: The tokenizer has no token that ends a text.
        """
        pad_id = tokenizer.pad_id or 0
        find = getattr(tokenizer, "token_id", lambda name: None)
        cls_id, sep_id = find("[CLS]"), find("[SEP]")
        if cls_id is not None and sep_id is not None:
            return cls((cls_id,), (sep_id,), (sep_id,), True, pad_id)
        bos_id, eos_id = find("<s>"), find("</s>")
        if bos_id is not None and eos_id is not None and find("<mask>") is not None:
            return cls((bos_id,), (eos_id, eos_id), (eos_id,), False, pad_id)
        if tokenizer.eod_id is None:
            raise DataError(
                "the tokenizer has neither [CLS] and [SEP] nor an end-of-document token, which "
                "texts of a classification end with; give another tokenizer"
            )
        begin = () if tokenizer.bos_id in (None, tokenizer.eod_id) else (tokenizer.bos_id,)
        return cls(begin, (tokenizer.eod_id,), (tokenizer.eod_id,), False, pad_id)

    def special_tokens(self, texts: int) -> int:
        """Returns the number of special tokens of a sample with one or two texts."""
        return len(self.begin) + (texts - 1) * len(self.between) + len(self.end)


@dataclass(frozen=True)
class ClassificationDataset:
    """Samples of labelled texts, in a new order in each epoch.

    A sample is a dictionary of arrays:

    - `tokens`: int64 `[s]`: the texts with special tokens (`TextFormat`), then padding.
    - `token_types`: int64 `[s]`: 1 in the second text of BERT's format, otherwise 0.
    - `document_ids`: int32 `[s]`: 0, or -1 for padding.
    - `positions`: int32 `[s]`.
    - `last_tokens`: int64 scalar: index of the last token that is not padding.
    - `classes`: int64 scalar: number of the label in `label_names`.
    - `weights`: float32 scalar: 1, or 0 for a sample that only completes a batch.
    - `sample_ids`: int64 scalar: index of the sample.

    A text that is too long loses tokens at its end; of two texts, the longer one loses them.

    Attributes:
        rows: The labelled texts.
        tokenizer: Tokenizer of the texts.
        classes: Number of each label.
        sequence_length: Tokens in a sample, `s`.
        size: Number of samples. None is one epoch.
        seed: Seed of the order. None is the order of the rows; samples after the last row have
            weight 0, so that an evaluation counts each row once.
    """

    rows: Sequence[LabelledText]
    tokenizer: Tokenizer
    classes: Mapping[str, int]
    sequence_length: int
    size: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        texts = max(len(row.texts) for row in self.rows)
        special = self.format.special_tokens(texts)
        if self.sequence_length < special + texts:
            raise DataError(
                f"sequence length {self.sequence_length} is too short for {special} special tokens "
                f"and a token of each text; give at least {special + texts}"
            )
        for row in self.rows:
            if row.label not in self.classes:
                known = ", ".join([*self.classes][:20])
                raise DataError(
                    f"{row.location}: the label {row.label!r:.100} is not one of the classes "
                    f"{known}; correct it, or name all classes"
                )

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.rows) if self.size is None else self.size

    def __getitem__(self, sample: int) -> Sample:
        """Returns a sample.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} is out of range; there are {len(self)} samples")
        epoch, index = divmod(sample, len(self.rows))
        counts = self.seed is not None or epoch == 0
        if self.seed is not None:
            index = int(_epoch_order(self.seed, epoch, len(self.rows))[index])
        row = self.rows[index]
        tokens, types = self._tokens(row)
        length = self.sequence_length
        document_ids = np.full(length, -1, np.int32)
        document_ids[: len(tokens)] = 0
        text = np.full(length, self.format.pad_id, np.int64)
        text[: len(tokens)] = tokens
        return {
            "tokens": text,
            "token_types": pad(types, length),
            "document_ids": document_ids,
            "positions": np.arange(length, dtype=np.int32),
            "last_tokens": np.asarray(len(tokens) - 1, np.int64),
            "classes": np.asarray(self.classes[row.label], np.int64),
            "weights": np.asarray(float(counts), np.float32),
            "sample_ids": np.asarray(sample, np.int64),
        }

    @cached_property
    def format(self) -> TextFormat:
        """The special tokens around texts."""
        return TextFormat.of(self.tokenizer)

    def _tokens(self, row: LabelledText) -> tuple[list[int], list[int]]:
        """Returns the tokens of a row with special tokens, and their types."""
        texts = [self.tokenizer.encode(text) for text in row.texts]
        room = self.sequence_length - self.format.special_tokens(len(texts))
        while sum(map(len, texts)) > room:
            longest = max(reversed(texts), key=len)  # of two equal ones the second
            longest.pop()
        begin, between, end, segments, _ = self.format
        tokens = [*begin, *texts[0]]
        if len(texts) == 1:
            return [*tokens, *end], [0] * (len(tokens) + len(end))
        tokens += between
        second = [*texts[1], *end]
        return tokens + second, [0] * len(tokens) + [int(segments)] * len(second)


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    """Returns the order of the rows in an epoch, int64 `[rows]`."""
    return np.random.default_rng((seed, epoch)).permutation(rows)


def split_rows(
    rows: Sequence[LabelledText], split: str = DEFAULT_SPLIT
) -> tuple[list[LabelledText], ...]:
    """Divides the rows of one table at random into training, validation and test rows.

    The division depends on the number of rows and on `split` alone, not on the seed of a run.

    Args:
        rows: The rows of a table.
        split: Fractions of the three splits. Defaults to "969,30,1".
    """
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(rows)).tolist()
    found = []
    for interval in parse_split(split):
        first, last = (0, 0) if interval is None else sequence_range(interval, len(rows))
        found.append([rows[index] for index in order[first:last]])
    return tuple(found)


def build_classification_datasets(
    splits: Sequence[Sequence[LabelledText] | None],
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    *,
    tokenizer: Tokenizer,
    classes: Sequence[str],
    sequence_length: int,
    seed: int = 1234,
) -> Datasets:
    """Builds the three datasets of a classification.

    Args:
        splits: Rows for training, validation and testing, such as the result of `split_rows`; None
            for a split that is not used.
        sizes: Number of samples of each dataset. None takes one epoch, 0 builds no dataset.
        tokenizer: Tokenizer of the texts.
        classes: All labels; the position of a label is the number of its class.
        sequence_length: Tokens in a sample.
        seed: Seed of the order of training samples. Defaults to 1234.

    Raises:
        EmptySplitError: A split has no row.
        DataError: A row has another label, or samples are too short.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    found: list[ClassificationDataset | None] = []
    for name, rows, size in zip(SPLITS, splits, sizes, strict=True):
        if rows is None or size == 0:
            found.append(None)
            continue
        if not rows:
            raise EmptySplitError(f"{name} split of the labelled texts: the split holds no row")
        order = seed if name == "train" else None
        found.append(ClassificationDataset(rows, tokenizer, numbers, sequence_length, size, order))
    return Datasets(*found)
