"""Left-to-right language modelling."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from megatron_ckpt import ModelRecord
from megatron_kernels import Mask
from megatron_models import CausalModel, Dropout, config_of, record_of, training_flops
from megatron_parallel import Axis, DropoutKey, TensorSpec, pool_group_name
from megatron_parallel.context_parallel import ContextSplit
from torch import Tensor, nn

from megatron_train.config.run import RunConfig
from megatron_train.tasks.task import MicroBatch

LOSS = "lm loss"


class GPTTask:
    """Predict each next token; the loss is cross entropy over the tokens that the mask keeps.

    Args:
        stages: this rank's stages of the model; one on a layout without pipeline.
        family: name of its family, kept in checkpoints.
        seed: of the dropout masks, which depend on it, the step and the number of the sample.
        hidden_dropout: probability of dropping an element of the residual branches.
        attention_dropout: probability of dropping an attention probability.
        reset_position_ids: take the positions of the batch instead of counting from 0.
        reset_attention_mask: attend within the documents of the batch instead of across them.
        cut_per_document: with context parallelism, cut every document by itself over the ranks, not
            the whole sequence; their work is then even.
        sequence_length: of the samples that rows are made of where the ranks are a pool
            (`ParallelLayout.hybrid_cp`, `megatron_train.document_pool`).
        label_smoothing: share of the training loss that all tokens of the vocabulary have in
            common; Megatron-LM has it in its loss function, and no flag for it.
    """

    losses = (LOSS,)
    reported = ()

    def __init__(
        self,
        stages: Sequence[CausalModel],
        family: str | None,
        *,
        seed: int = 1234,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        cut_per_document: bool = False,
        sequence_length: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self._stages = tuple(stages)
        self._family = family
        self._seed = seed
        self._hidden_dropout = hidden_dropout
        self._attention_dropout = attention_dropout
        self._reset_position_ids = reset_position_ids
        self._reset_attention_mask = reset_attention_mask
        self._cut_per_document = cut_per_document
        self._label_smoothing = label_smoothing
        self._mesh = self._stages[0].mesh
        self._cp = self._mesh.axis("cp")
        self._sequence_length = sequence_length

    @property
    def model_record(self) -> ModelRecord:
        """The model's kind, family and configuration."""
        return ModelRecord(family=self._family, **record_of(self._stages[0].config))

    def migrated(self, record: ModelRecord) -> dict[str, Any]:
        """Returns the configuration of a checkpoint's record in the fields of today."""
        return config_of(record).to_dict()

    @property
    def stages(self) -> Sequence[CausalModel]:
        """This rank's stages."""
        return self._stages

    @property
    def auxiliary_losses(self) -> Sequence[str]:
        """Names of the losses of routers, if the model has any."""
        return self._stages[0].config.auxiliary_losses

    def units(self, stage: nn.Module) -> Sequence[nn.Module]:
        """Returns the blocks of a stage."""
        return [block for own in self._stages if own is stage for block in own.layers.values()]

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Returns the number of tokens that count; for routers, of those that are not padding."""
        counts = {LOSS: sum(float(batch.fields["loss_mask"].double().sum()) for batch in batches)}
        if self.auxiliary_losses:
            routed = float(sum(self._routed(batch) for batch in batches))
            counts |= dict.fromkeys(self.auxiliary_losses, routed)
        return counts

    def _routed(self, batch: MicroBatch) -> int:
        if self._reset_attention_mask:
            return int((batch.fields["document_ids"] >= 0).sum())
        return batch.fields["tokens"].numel()

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """Returns the batch at this rank's places.

        What masks are made of stays whole: ``document_ids`` and ``sample_ids``.
        """
        fields, split = batch.fields, batch.split
        if split is None and self._cut_per_document:
            split = ContextSplit.per_document(fields["document_ids"], self._cp.size)
        elif split is None:
            tokens = fields["tokens"]
            split = ContextSplit.zigzag(tokens.shape[1], self._cp.size, tokens.device)
        index = self._context(split.ranks).index
        by_place = fields.keys() & {"tokens", "labels", "loss_mask", "positions"}
        own = {name: split.take(fields[name], index) for name in by_place}
        return dataclasses.replace(batch.replaced(**own), split=split)

    def inputs(self, batch: MicroBatch, stage: int, iteration: int | None) -> Mapping[str, Any]:
        """Returns tokens for the first stage, labels for the last, mask and dropout for all."""
        own = next(one for one in self._stages if one.stage == stage)
        fields, given = batch.fields, dict[str, Any]()
        if own.first:
            given["x"] = fields["tokens"]
        if own.last:
            given["labels"] = fields["labels"]
            if iteration is not None:
                given["label_smoothing"] = self._label_smoothing
        pooled = self._mesh.layout.hybrid_cp
        if self._reset_position_ids or pooled:
            given["positions"] = fields["positions"]
        if self._reset_attention_mask or pooled:
            given["mask"] = Mask(document_ids=fields["document_ids"])
        if batch.split is not None:
            given["split"] = batch.split
            if pooled:
                given["cp"] = self._context(batch.split.ranks)
        if iteration is not None and (self._hidden_dropout or self._attention_dropout):
            given["dropout"] = self._dropout(batch, iteration)
        return given

    def _context(self, ranks: int) -> Axis:
        """Returns the ranks that a micro-batch is cut over; of a pool, by their number."""
        pooled = self._mesh.layout.hybrid_cp
        return self._mesh.axis(pool_group_name(ranks)) if pooled else self._cp

    def _dropout(self, batch: MicroBatch, iteration: int) -> Dropout:
        """Returns what is dropped; in rows of a pool, as in the samples that they are made of."""
        rates = self._hidden_dropout, self._attention_dropout
        if self._mesh.layout.hybrid_cp:
            samples, places = batch.fields["sample_ids"].t(), batch.fields["sample_places"]
            key = DropoutKey.for_tokens(self._seed, iteration, samples, places.t())
            return Dropout(key, *rates, places, self._sequence_length)
        key = DropoutKey.for_batch(
            seed=self._seed,
            iteration=iteration,
            samples=batch.fields["sample_ids"],
            positions=batch.fields["tokens"].shape[1] * self._cp.size,
        )
        return Dropout(key, *rates)

    def stage_output_spec(self, batch: MicroBatch, stage: int) -> TensorSpec:
        """Returns shape and dtype of the activations between two stages."""
        samples, part = batch.fields["tokens"].shape
        return self._stages[0].stage_output_spec(samples, part * self._cp.size)

    def loss(self, output: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the cross entropy ``[b, s]`` summed over the tokens that count."""
        return {LOSS: (output * batch.fields["loss_mask"]).sum()}

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the operations of a forward and backward pass over the batches."""
        config, length = self._stages[0].config, self._sequence_length
        if not self._mesh.layout.hybrid_cp:
            length = batches[0].fields["tokens"].shape[1]
        tokens = sum(batch.tokens for batch in batches)
        return float(training_flops(config, length or 0, tokens))


def gpt_task(run: RunConfig, stages: Sequence[nn.Module], family: str | None) -> GPTTask:
    """Returns the task of a run, see `megatron_train.tasks.kinds.TaskKind`."""
    training, data = run.training, run.data
    return GPTTask(
        cast(Sequence[CausalModel], stages),
        family,
        seed=training.seed,
        hidden_dropout=training.hidden_dropout,
        attention_dropout=training.attention_dropout,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        cut_per_document=run.placement.context_parallel_split == "per_document",
        sequence_length=data.seq_length,
    )
