"""Samples of span corruption."""

from typing import Any

from megatron_data import Datasets, T5DatasetConfig, build_t5_datasets

from megatron_train.tasks.masking import MaskingSettings
from megatron_train.tasks.sentence_data import SentenceData
from megatron_train.tasks.t5_kind import SpanSettings


class T5Data(SentenceData):
    """Texts with a sentinel in place of each masked span, and the spans."""

    token_field = "encoder_tokens"
    vocabulary_fields = ("encoder_tokens", "decoder_tokens", "labels")

    def masking_settings(self) -> MaskingSettings:
        """Returns the settings of spans."""
        return self.run.section(SpanSettings)

    def build(self, sizes: tuple[int, int, int], **options: Any) -> Datasets:
        """Builds the datasets; see `SentenceData.build`."""
        config = T5DatasetConfig(
            sequence_length=self.run.data.seq_length,
            decoder_sequence_length=self.run.section(SpanSettings).decoder_seq_length,
            masking=self.settings.masking(),
            short_probability=self.settings.short_seq_prob,
        )
        return build_t5_datasets(sizes=sizes, config=config, **options)
