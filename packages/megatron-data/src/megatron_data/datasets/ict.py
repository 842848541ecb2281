"""Samples of the inverse cloze task: a sentence, and the block of text it was taken from."""

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
"""[CLS] and two [SEP] around title and block."""


@dataclass(frozen=True)
class ICTDatasetConfig:
    """How blocks become samples.

    Raises:
        DataError: A sample too short for its special tokens, or a share that is none.
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
            "help": "share of samples whose query stays in the block",
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
                f"sequence length {self.sequence_length}; a block has {SPECIAL_TOKENS} special "
                f"tokens, give at least {SPECIAL_TOKENS + 2}"
            )
        if not 0 <= self.query_in_block_probability <= 1:
            raise DataError(
                f"share of queries in their block {self.query_in_block_probability}; give one "
                "from 0 to 1"
            )

    @property
    def block_length(self) -> int:
        """Tokens of title and block together."""
        return self.sequence_length - SPECIAL_TOKENS

    @property
    def title_length(self) -> int:
        """Tokens that a title has at most; what is longer is cut."""
        return self.block_length // 2


class DocumentSource(Protocol):
    """Where titles come from: an `IndexedDataset`, or anything that has documents by number."""

    def document(self, number: int, /) -> NDArray[np.integer]:
        """All tokens of a document."""


class ICTDataset:
    """Samples of the inverse cloze task along a map of blocks.

    A sample is a dictionary of arrays:

    - `query_tokens`: int64 `[s]`: [CLS] sentence [SEP].
    - `context_tokens`: int64 `[s]`: [CLS] title [SEP] block [SEP]; without titles [CLS] block
      [SEP]. Most times the sentence is not in its block.
    - `query_document_ids`, `context_document_ids`: int32 `[s]`: 0, or -1 for padding.
    - `block_data`: int64 `[4]`: first sentence, the one after the last, document, and number of
      the block within an epoch.
    - `sample_ids`: int64 scalar, the number asked for.

    Padding is token 0. Samples are made as by Megatron's `ICTDataset`, but that the draws of each
    come from a generator of its own, and that the only sentence of a block stays in it.

    Args:
        source: Sentences.
        titles: A title for each document; None for none.
        sample_map: See `block_map`, made with `block_length`; documents are numbered in `titles`.
        config: How they become a sample.
        word_pieces: Of the vocabulary.
        seed: Of the draws; sample i has its own generator, seeded with the sum.
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
            raise IndexError(f"sample {sample} of {len(self)}")
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
        """Tokens between special ones, cut to the sequence length, and document numbers."""
        word_pieces = self.word_pieces
        before = (
            [word_pieces.cls_id]
            if title is None
            else [word_pieces.cls_id, *title, word_pieces.sep_id]
        )
        room = self.config.sequence_length - len(before) - 1
        whole = [*before, *tokens[:room], word_pieces.sep_id]
        return pad_text(whole, self.config.sequence_length)
