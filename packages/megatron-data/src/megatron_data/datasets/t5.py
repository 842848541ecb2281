"""T5 samples: span corruption."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample
from megatron_data.datasets.gpt import TokenSource
from megatron_data.datasets.masking import MaskedText, MaskingConfig, WordPieces, mask_tokens
from megatron_data.datasets.padding import pad, pad_text
from megatron_data.datasets.sentences import check_short_probability, sample_generator, sample_row
from megatron_data.errors import DataError

SPECIAL_TOKENS = 2
"""Number of special tokens that Megatron reserves in a sample."""


@dataclass(frozen=True)
class T5DatasetConfig:
    """Configuration of T5 samples.

    Raises:
        DataError: A sequence length leaves no room for text, or a probability is out of range.
    """

    sequence_length: int = field(
        metadata={"help": "tokens of the encoder's input", "flag": "--seq-length"}
    )
    decoder_sequence_length: int = field(
        metadata={"help": "tokens of the decoder's input", "flag": "--decoder-seq-length"}
    )
    masking: MaskingConfig = field(
        default_factory=lambda: MaskingConfig(max_ngram=10, geometric=True)
    )
    short_probability: float = field(
        default=0.1, metadata={"help": "fraction of shorter samples", "flag": "--short-seq-prob"}
    )

    def __post_init__(self) -> None:
        for name, length in (
            ("sequence length", self.sequence_length),
            ("decoder sequence length", self.decoder_sequence_length),
        ):
            if length <= SPECIAL_TOKENS + 1:
                raise DataError(f"{name} {length}; give at least {SPECIAL_TOKENS + 2}")
        check_short_probability(self.short_probability)


class T5Dataset:
    """T5 samples from sentences.

    A sample is a dictionary of arrays, with s tokens for the encoder and t for the decoder:

    - `encoder_tokens`: int64 `[s]`: the text with a sentinel in place of each masked span.
    - `decoder_tokens`: int64 `[t]`: beginning of sequence, then each sentinel and its span.
    - `labels`: int64 `[t]`: `decoder_tokens` without the first token, then end of sequence.
    - `loss_mask`: float32 `[t]`: 0 for padding, otherwise 1.
    - `encoder_document_ids`, `decoder_document_ids`: int32 `[s]` and `[t]`: 0, or -1 for padding.
    - `truncated`: int64 scalar: 1 if the sentences have more tokens than the sample takes,
      otherwise 0.
    - `sample_ids`: int64 scalar: index of the sample.

    Padding is token 0. Samples equal those of megatron-core's `T5MaskedWordPieceDataset`, which
    also treats every padding token inside the text as padding.

    Args:
        source: Dataset with one sequence per sentence.
        sample_map: Result of `sentence_map` with `max_length=sequence_length - 2`.
        config: Configuration of the samples.
        word_pieces: Properties of the vocabulary, including `bos_id`, `eos_id` and sentinels.
        seed: Seed of the random draws. The generator of sample i has the seed `seed + i`.

    Raises:
        DataError: The vocabulary lacks one of these tokens.
    """

    def __init__(
        self,
        source: TokenSource,
        sample_map: NDArray[np.unsignedinteger],
        config: T5DatasetConfig,
        word_pieces: WordPieces,
        seed: int,
    ) -> None:
        if word_pieces.bos_id is None or word_pieces.eos_id is None or not word_pieces.sentinel_ids:
            raise DataError(
                "T5 samples need sentinels and tokens for the beginning and the end of a sequence; "
                "add them to the tokenizer (Megatron: --vocab-extra-ids 100)"
            )
        self.source = source
        self.sample_map = sample_map
        self.config = config
        self.word_pieces = word_pieces
        self.seed = seed
        self._begin, self._end = word_pieces.bos_id, word_pieces.eos_id

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.sample_map)

    def __getitem__(self, sample: int) -> Sample:
        first, last, target = sample_row(self.sample_map, sample)
        random = sample_generator(self.seed, sample)
        text = [
            token for number in range(first, last) for token in self.source.get(number).tolist()
        ]
        masked = mask_tokens(
            text[:target],
            target,
            random,
            self.config.masking,
            self.word_pieces,
            lambda: self.word_pieces.mask_id,
        )
        encoder, spans = self._corrupted(sample, masked)
        decoder = [self._begin, *spans]
        length, decoder_length = self.config.sequence_length, self.config.decoder_sequence_length
        for side, tokens_of_side, max_length in (
            ("encoder", encoder, length),
            ("decoder", decoder, decoder_length),
        ):
            if len(tokens_of_side) > max_length:
                raise DataError(
                    f"sample {sample} has {len(tokens_of_side)} tokens for the {side}, which has "
                    f"room for {max_length}; increase its sequence length, or mask fewer tokens"
                )
        encoder_tokens, encoder_ids = pad_text(encoder, length)
        decoder_tokens, decoder_ids = pad_text(decoder, decoder_length)
        labels = pad([*spans, self._end], decoder_length)
        loss_mask = np.zeros(decoder_length, np.float32)
        loss_mask[: len(decoder)] = 1
        return {
            "encoder_tokens": encoder_tokens,
            "decoder_tokens": decoder_tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "encoder_document_ids": encoder_ids,
            "decoder_document_ids": decoder_ids,
            "truncated": np.asarray(int(len(text) > target), np.int64),
            "sample_ids": np.asarray(sample, np.int64),
        }

    def _corrupted(self, sample: int, masked: MaskedText) -> tuple[list[int], list[int]]:
        """Returns the text with a sentinel for each span, and the spans after their sentinels."""
        sentinels = self.word_pieces.sentinel_ids
        if len(masked.spans) > len(sentinels):
            raise DataError(
                f"sample {sample} has {len(masked.spans)} masked spans, but the tokenizer has "
                f"{len(sentinels)} sentinels; add more of them (Megatron: --vocab-extra-ids)"
            )
        text: list[int] = []
        spans: list[int] = []
        begin = 0
        for sentinel, span in zip(sentinels, masked.spans, strict=False):
            text += [*masked.tokens[begin : span.positions[0]], sentinel]
            spans += [sentinel, *span.labels]
            begin = span.positions[-1] + 1
        return text + masked.tokens[begin:], spans
