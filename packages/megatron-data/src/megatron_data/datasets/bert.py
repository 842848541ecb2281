"""BERT samples: masked language modelling and sentence order prediction."""

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
"""Number of special tokens in a sample: [CLS] and two [SEP]."""

_MASKED, _UNCHANGED = 0.8, 0.5  # fraction of the hidden tokens, and of the others


@dataclass(frozen=True)
class BertDatasetConfig:
    """Configuration of BERT samples.

    Raises:
        DataError: `sequence_length` leaves no room for text, or a probability is out of range.
    """

    sequence_length: int = field(metadata={"help": "tokens in a sample", "flag": "--seq-length"})
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    short_probability: float = field(
        default=0.1, metadata={"help": "fraction of shorter samples", "flag": "--short-seq-prob"}
    )
    binary_head: bool = field(
        default=True,
        metadata={
            "help": "two segments per sample, half of the time in the wrong order, for sentence "
            "order prediction"
        },
    )

    def __post_init__(self) -> None:
        if self.sequence_length <= SPECIAL_TOKENS + 1:
            raise DataError(
                f"sequence length {self.sequence_length} is too short for a BERT sample, which has "
                f"{SPECIAL_TOKENS} special tokens; give at least {SPECIAL_TOKENS + 2}"
            )
        check_short_probability(self.short_probability)

    @property
    def min_sentences(self) -> int:
        """Minimum number of sentences in a sample."""
        return 2 if self.binary_head else 1


class BertDataset:
    """BERT samples from sentences.

    A sample is a dictionary of arrays:

    - `tokens`: int64 `[s]`: [CLS] A [SEP] B [SEP] with some words masked, then 0 as padding.
    - `token_types`: int64 `[s]`: 1 in the second segment, otherwise 0.
    - `labels`: int64 `[s]`: the original token where a token is masked, otherwise 0.
    - `loss_mask`: float32 `[s]`: 1 where a token is masked, otherwise 0.
    - `document_ids`: int32 `[s]`: 0, or -1 for padding.
    - `positions`: int32 `[s]`.
    - `is_random`: int64 scalar: 1 if the segments are in the wrong order, otherwise 0.
    - `truncated`: int64 scalar: 1 if the sentences have more tokens than the sample takes,
      otherwise 0.
    - `sample_ids`: int64 scalar: index of the sample.

    Samples equal those of megatron-core's `BERTMaskedWordPieceDataset`, except that its padding
    mask holds the padding token where it should hold 0, and its labels without loss are -1. It also
    hides a [PAD] inside the text from attention, such as a random replacement of a masked token,
    although the token counts in the loss. Here that token is text.

    Args:
        source: Dataset with one sequence per sentence.
        sample_map: Result of `sentence_map` with `max_length=sequence_length - 3`.
        config: Configuration of the samples.
        word_pieces: Properties of the vocabulary.
        seed: Seed of the random draws. The generator of sample i has the seed `seed + i`.
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
        truncated = len(left) + len(right) > target
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
            "truncated": np.asarray(int(truncated), np.int64),
            "sample_ids": np.asarray(sample, np.int64),
        }

    def _segments(
        self, sentences: list[list[int]], random: np.random.RandomState
    ) -> tuple[list[int], list[int], bool]:
        """Returns both segments and whether they are swapped; the second is empty without a head.

        Half of the samples are swapped.
        """
        pivot, is_random = len(sentences), False
        if self.config.binary_head:
            pivot = int(random.randint(1, len(sentences))) if len(sentences) > 2 else 1
            is_random = bool(random.random_sample() < 0.5)
        left = [token for sentence in sentences[:pivot] for token in sentence]
        right = [token for sentence in sentences[pivot:] for token in sentence]
        return (right, left, is_random) if is_random else (left, right, is_random)

    def _replacement(self, random: np.random.RandomState) -> int | None:
        """Draws [MASK] for 80 % of the tokens, a random token for 10 %, None (keep) for 10 %."""
        if random.random_sample() < _MASKED:
            return self.word_pieces.mask_id
        if random.random_sample() >= _UNCHANGED:
            return int(random.randint(0, len(self.word_pieces.continuations)))
        return None


def _shortened(
    left: list[int], right: list[int], target: int, random: np.random.RandomState
) -> tuple[list[int], list[int]]:
    """Drops tokens at either end of the longer segment until both have `target` tokens in sum."""
    bounds = [[0, len(left)], [0, len(right)]]
    while (lengths := [end - begin for begin, end in bounds])[0] + lengths[1] > target:
        longer = bounds[0] if lengths[0] > lengths[1] else bounds[1]
        if random.random_sample() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return left[slice(*bounds[0])], right[slice(*bounds[1])]
