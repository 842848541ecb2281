"""Samples of BERT's pretraining: pairs of segments with masked words."""

from typing import Any

from megatron_data import BertDatasetConfig, Datasets, build_bert_datasets

from megatron_train.tasks.sentence_data import SentenceData


class BertData(SentenceData):
    """Samples with two segments if the model predicts their order, otherwise with one."""

    def build(self, sizes: tuple[int, int, int], **options: Any) -> Datasets:
        """Builds the datasets; see `SentenceData.build`."""
        config = BertDatasetConfig(
            sequence_length=self.run.data.seq_length,
            masking=self.settings.masking(),
            short_probability=self.settings.short_seq_prob,
            binary_head=self.run.model.bert_binary_head,  # type: ignore[attr-defined]
        )
        return build_bert_datasets(sizes=sizes, config=config, **options)

    def identity(self) -> dict[str, Any]:
        """Returns the settings of masking, the order and whether samples are pairs."""
        pairs: bool = self.run.model.bert_binary_head  # type: ignore[attr-defined]
        return {**super().identity(), "sentence_pairs": pairs}
