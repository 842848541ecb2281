"""Samples of masked language modelling with sentence order, as BERT is trained on."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample
from megatron_data.datasets.gpt import TokenSource
from megatron_data.datasets.masking import MaskingConfig, WordPieces, mask_tokens
from megatron_data.datasets.padding import pad, pad_text
from megatron_data.datasets.sentences import check_short_probability, sample_generator, sample_row
from megatron_data.errors import DataError

SPECIAL_TOKENS = 3
"""[CLS] and two [SEP]."""

_MASKED, _OTHER = 0.8, 0.5  # of the hidden tokens; of the rest


@dataclass(frozen=True)
class BertDatasetConfig:
    """How sentences become samples.

    Raises:
        DataError: A sample too short for its special tokens, or a share that is none.
    """

    sequence_length: int = field(metadata={"help": "tokens in a sample", "flag": "--seq-length"})
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    short_probability: float = field(
        default=0.1, metadata={"help": "share of shorter samples", "flag": "--short-seq-prob"}
    )
    binary_head: bool = field(
        default=True,
        metadata={
            "help": "samples of two segments, half of them in the wrong order, for a second task"
        },
    )

    def __post_init__(self) -> None:
        if self.sequence_length <= SPECIAL_TOKENS + 1:
            raise DataError(
                f"sequence length {self.sequence_length}; a BERT sample has {SPECIAL_TOKENS} "
                "special tokens, give more"
            )
        check_short_probability(self.short_probability)

    @property
    def min_sentences(self) -> int:
        """Sentences a sample has at least."""
        return 2 if self.binary_head else 1


class BertDataset:
    """BERT samples along a map of sentences.

    A sample is a dictionary of arrays:

    - `tokens`: int64 `[s]`: [CLS] A [SEP] B [SEP] with words hidden; padding is 0.
    - `token_types`: int64 `[s]`: 1 in the second segment.
    - `labels`: int64 `[s]`: the hidden tokens; 0 elsewhere.
    - `loss_mask`: float32 `[s]`: 1 where a token is to be restored.
    - `document_ids`: int32 `[s]`: 0, or -1 for padding.
    - `positions`: int32 `[s]`.
    - `is_random`: int64 scalar: 1 where the segments are in the wrong order.
    - `sample_ids`: int64 scalar, the number asked for.

    Samples equal those of megatron-core's `BERTMaskedWordPieceDataset`, whose padding mask holds
    the number of the padding token where it should hold 0, and whose labels without loss are -1.
    It also masks a [PAD] inside the text, such as one drawn in place of a hidden token, which
    bears a loss; here that token attends and is attended to.

    Args:
        source: Sentences.
        sample_map: See `sentence_map`, made with `sequence_length - 3`.
        config: How they become a sample.
        word_pieces: Of the vocabulary.
        seed: Of the draws; sample i has its own generator, seeded with the sum.
    """

    def __init__(
        self,
        source: TokenSource,
        sample_map: NDArray[np.unsignedinteger],
        config: BertDatasetConfig,
        word_pieces: WordPieces,
        seed: int,
    ) -> None:
        self.source = source
        self.sample_map = sample_map
        self.config = config
        self.word_pieces = word_pieces
        self.seed = seed

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.sample_map)

    def __getitem__(self, sample: int) -> Sample:
        first, last, target = sample_row(self.sample_map, sample)
        random = sample_generator(self.seed, sample)
        sentences = [self.source.get(number).tolist() for number in range(first, last)]
        left, right, is_random = self._segments(sentences, random)
        left, right = _shortened(left, right, target, random)
        word_pieces = self.word_pieces
        tokens = [word_pieces.cls_id, *left, word_pieces.sep_id]
        types = [0] * len(tokens)
        if right:
            tokens += [*right, word_pieces.sep_id]
            types += [1] * (len(right) + 1)
        masked = mask_tokens(
            tokens,
            target,
            random,
            self.config.masking,
            word_pieces,
            lambda: self._replacement(random),
        )
        length = self.config.sequence_length
        text, document_ids = pad_text(masked.tokens, length)
        labels, loss_mask = np.zeros(length, np.int64), np.zeros(length, np.float32)
        labels[masked.positions] = masked.labels
        loss_mask[masked.positions] = 1
        return {
            "tokens": text,
            "token_types": pad(types, length),
            "labels": labels,
            "loss_mask": loss_mask,
            "document_ids": document_ids,
            "positions": np.arange(length, dtype=np.int32),
            "is_random": np.asarray(int(is_random), np.int64),
            "sample_ids": np.asarray(sample, np.int64),
        }

    def _segments(
        self, sentences: list[list[int]], random: np.random.RandomState
    ) -> tuple[list[int], list[int], bool]:
        """Both segments, in the wrong order half of the time; one without the second task."""
        pivot, is_random = len(sentences), False
        if self.config.binary_head:
            pivot = int(random.randint(1, len(sentences))) if len(sentences) > 2 else 1
            is_random = bool(random.random_sample() < 0.5)
        left = [token for sentence in sentences[:pivot] for token in sentence]
        right = [token for sentence in sentences[pivot:] for token in sentence]
        return (right, left, is_random) if is_random else (left, right, is_random)

    def _replacement(self, random: np.random.RandomState) -> int | None:
        """[MASK] for 80 % of the hidden tokens, any token for 10 %, itself for 10 %."""
        if random.random_sample() < _MASKED:
            return self.word_pieces.mask_id
        if random.random_sample() >= _OTHER:
            return int(random.randint(0, len(self.word_pieces.continuations)))
        return None


def _shortened(
    left: list[int], right: list[int], target: int, random: np.random.RandomState
) -> tuple[list[int], list[int]]:
    """Drops tokens at either end of the longer segment until both have `target` together."""
    bounds = [[0, len(left)], [0, len(right)]]
    while (lengths := [end - begin for begin, end in bounds])[0] + lengths[1] > target:
        longer = bounds[0] if lengths[0] > lengths[1] else bounds[1]
        if random.random_sample() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return left[slice(*bounds[0])], right[slice(*bounds[1])]
