"""Samples of the inverse cloze task: a sentence and the block of text that it comes from."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample
from megatron_data.datasets.gpt import TokenSource
from megatron_data.datasets.masking import WordPieces
from megatron_data.datasets.padding import pad_text
from megatron_data.datasets.sentences import sample_generator
from megatron_data.errors import DataError

SPECIAL_TOKENS = 3
"""Number of special tokens around title and block: [CLS] and two [SEP]."""


@dataclass(frozen=True)
class ICTDatasetConfig:
    """Configuration of samples of the inverse cloze task.

    Raises:
        DataError: `sequence_length` leaves no room for text, or the probability is out of range.
    """

    sequence_length: int = field(
        metadata={
            "help": "tokens of a query, and of a block with its title",
            "flag": "--seq-length",
        }
    )
    query_in_block_probability: float = field(
        default=0.1,
        metadata={
            "help": "fraction of samples whose query stays in the block",
            "flag": "--query-in-block-prob",
        },
    )
    use_one_sentence_documents: bool = field(
        default=False,
        metadata={"help": "allow blocks of one sentence", "flag": "--use-one-sent-docs"},
    )

    def __post_init__(self) -> None:
        if self.sequence_length < SPECIAL_TOKENS + 2:
            raise DataError(
                f"sequence length {self.sequence_length} is too short for a block with "
                f"{SPECIAL_TOKENS} special tokens; give at least {SPECIAL_TOKENS + 2}"
            )
        if not 0 <= self.query_in_block_probability <= 1:
            raise DataError(
                f"query_in_block_probability {self.query_in_block_probability} is not a "
                "probability; give 0 to 1"
            )

    @property
    def block_length(self) -> int:
        """Largest number of tokens of title and block together."""
        return self.sequence_length - SPECIAL_TOKENS

    @property
    def title_length(self) -> int:
        """Largest number of tokens of a title. Longer titles are truncated."""
        return self.block_length // 2


class DocumentSource(Protocol):
    """A source of titles, such as an `IndexedDataset`."""

    def document(self, number: int, /) -> NDArray[np.integer]:
        """Returns the tokens of a document."""


class ICTDataset:
    """Samples of the inverse cloze task from blocks of sentences.

    A sample is a dictionary of arrays:

    - `query_tokens`: int64 `[s]`: [CLS] sentence [SEP].
    - `context_tokens`: int64 `[s]`: [CLS] title [SEP] block [SEP], or [CLS] block [SEP] without
      titles. The sentence is removed from the block except in a fraction of
      `query_in_block_probability` of the samples.
    - `query_document_ids`, `context_document_ids`: int32 `[s]`: 0, or -1 for padding.
    - `block_data`: int64 `[4]`: first sentence, end, document, and index of the block within an
      epoch.
    - `sample_ids`: int64 scalar: index of the sample.

    Padding is token 0. Samples follow Megatron's `ICTDataset`, except that each sample has its own
    random generator, and that the only sentence of a block is not removed.

    Args:
        source: Dataset with one sequence per sentence.
        titles: Title of each document. None for samples without titles.
        sample_map: Result of `block_map` with `block_length`. Its documents are indices in
            `titles`.
        config: Configuration of the samples.
        word_pieces: Properties of the vocabulary.
        seed: Seed of the random draws. The generator of sample i has the seed `seed + i`.
    """

    def __init__(
        self,
        source: TokenSource,
        titles: DocumentSource | None,
        sample_map: NDArray[np.unsignedinteger],
        config: ICTDatasetConfig,
        word_pieces: WordPieces,
        seed: int,
    ) -> None:
        self.source = source
        self.titles = titles
        self.sample_map = sample_map
        self.config = config
        self.word_pieces = word_pieces
        self.seed = seed

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.sample_map)

    def __getitem__(self, sample: int) -> Sample:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} is out of range; there are {len(self)} samples")
        row = self.sample_map[sample].astype(np.int64)
        first, last, document, _ = row.tolist()
        random = sample_generator(self.seed, sample)
        block = [self.source.get(number).tolist() for number in range(first, last)]
        chosen = int(random.randint(len(block)))
        query = block[chosen]
        if random.random_sample() >= self.config.query_in_block_probability and len(block) > 1:
            del block[chosen]
        query_tokens, query_ids = self._text(query)
        text = [token for sentence in block for token in sentence]
        context_tokens, context_ids = self._text(text, self._title(document))
        return {
            "query_tokens": query_tokens,
            "query_document_ids": query_ids,
            "context_tokens": context_tokens,
            "context_document_ids": context_ids,
            "block_data": row,
            "sample_ids": np.asarray(sample, np.int64),
        }

    def _title(self, document: int) -> list[int] | None:
        if self.titles is None:
            return None
        title: list[int] = self.titles.document(document)[: self.config.title_length].tolist()
        return title

    def _text(
        self, tokens: list[int], title: list[int] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns padded tokens with special tokens, and document ids. Truncates long text."""
        word_pieces = self.word_pieces
        prefix = (
            [word_pieces.cls_id]
            if title is None
            else [word_pieces.cls_id, *title, word_pieces.sep_id]
        )
        room = self.config.sequence_length - len(prefix) - 1
        text = [*prefix, *tokens[:room], word_pieces.sep_id]
        return pad_text(text, self.config.sequence_length)
