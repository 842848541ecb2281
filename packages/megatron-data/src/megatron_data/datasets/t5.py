"""Samples of span corruption, as T5 is trained on."""

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
"""What Megatron leaves room for beside the text."""


@dataclass(frozen=True)
class T5DatasetConfig:
    """How sentences become samples.

    Raises:
        DataError: A sample too short for its special tokens, or a share that is none.
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
        default=0.1, metadata={"help": "share of shorter samples", "flag": "--short-seq-prob"}
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
    """T5 samples along a map of sentences.

    A sample is a dictionary of arrays, s tokens for the encoder and t for the decoder:

    - `encoder_tokens`: int64 `[s]`: the text, each hidden span replaced by a sentinel.
    - `decoder_tokens`: int64 `[t]`: beginning of sequence, then each sentinel and its span.
    - `labels`: int64 `[t]`: the same without the first token, and the end of sequence.
    - `loss_mask`: float32 `[t]`: 0 on padding.
    - `encoder_document_ids`, `decoder_document_ids`: int32: 0, or -1 for padding.
    - `sample_ids`: int64 scalar, the number asked for.

    Samples equal those of megatron-core's `T5MaskedWordPieceDataset`, but that padding, token 0, is
    only what stands behind the text; it also masks every padding token inside the text.

    Args:
        source: Sentences.
        sample_map: See `sentence_map`, made with `sequence_length - 2` and one sentence at least.
        config: How they become a sample.
        word_pieces: Of the vocabulary; needs sentinels, and tokens that begin and end a sequence.
        seed: Of the draws; sample i has its own generator, seeded with the sum.

    Raises:
        DataError: A vocabulary without those tokens.
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
                "T5 samples need sentinels and tokens that begin and end a sequence; add them to "
                "the tokenizer (Megatron: --vocab-extra-ids 100)"
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
        tokens = [
            token for number in range(first, last) for token in self.source.get(number).tolist()
        ][:target]
        masked = mask_tokens(
            tokens,
            target,
            random,
            self.config.masking,
            self.word_pieces,
            lambda: self.word_pieces.mask_id,
        )
        encoder, spans = self._corrupted(sample, masked)
        decoder = [self._begin, *spans]
        length, decoder_length = self.config.sequence_length, self.config.decoder_sequence_length
        for side, filled, room in (
            ("encoder", encoder, length),
            ("decoder", decoder, decoder_length),
        ):
            if len(filled) > room:
                raise DataError(
                    f"sample {sample} has {len(filled)} tokens for the {side}, which takes {room}; "
                    "give it more, or hide fewer"
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
            "sample_ids": np.asarray(sample, np.int64),
        }

    def _corrupted(self, sample: int, masked: MaskedText) -> tuple[list[int], list[int]]:
        """The text with sentinels for its hidden spans, and the spans, each after its sentinel."""
        sentinels = self.word_pieces.sentinel_ids
        if len(masked.spans) > len(sentinels):
            raise DataError(
                f"sample {sample} has {len(masked.spans)} hidden spans, the tokenizer "
                f"{len(sentinels)} sentinels; add more of them (Megatron: --vocab-extra-ids)"
            )
        text: list[int] = []
        spans: list[int] = []
        done = 0
        for sentinel, span in zip(sentinels, masked.spans, strict=False):
            text += [*masked.tokens[done : span.positions[0]], sentinel]
            spans += [sentinel, *span.labels]
            done = span.positions[-1] + 1
        return text + masked.tokens[done:], spans
