"""Samples of span corruption."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_data import Datasets, T5DatasetConfig, Tokenizer, build_t5_datasets

from megatron_train.tasks.masking import MaskingSettings
from megatron_train.tasks.sentence_data import SentenceData
from megatron_train.tasks.t5_kind import SpanSettings
from megatron_train.tokenizer import open_tokenizer


class T5Data(SentenceData):
    """Texts with a sentinel in place of each masked span, and the spans."""

    token_field = "encoder_tokens"
    vocabulary_fields = ("encoder_tokens", "decoder_tokens", "labels")

    def masking_settings(self) -> MaskingSettings:
        """Returns the settings of spans."""
        return self.run.section(SpanSettings)

    def corpus_tokenizers(self) -> Iterator[Tokenizer]:
        """Yields the run's tokenizer, and the same without the sentinels that the run adds.

        Corpora hold no sentinels, and Megatron-LM's are made without them.
        """
        yield from super().corpus_tokenizers()
        if self.run.data.vocab_extra_ids:
            plain = open_tokenizer(replace(self.run.data, vocab_extra_ids=None))
            if plain is not None:
                yield plain

    def build(self, sizes: tuple[int, int, int], **options: Any) -> Datasets:
        """Builds the datasets; see `SentenceData.build`."""
        config = T5DatasetConfig(
            sequence_length=self.run.data.seq_length,
            decoder_sequence_length=self.run.section(SpanSettings).decoder_seq_length,
            masking=self.settings.masking(),
            short_probability=self.settings.short_seq_prob,
        )
        return build_t5_datasets(sizes=sizes, config=config, **options)
