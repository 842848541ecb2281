"""Left-to-right language modelling."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ckpt import ModelRecord
from megatron_kernels import Mask
from megatron_models import CausalModel, Dropout, config_of, record_of, training_flops
from megatron_parallel import Axis, DropoutKey, Passed, pool_group_name
from megatron_parallel.context_parallel import ContextSplit
from torch import Tensor, nn

from megatron_train.document_pool import EXTENT, PLACES
from megatron_train.errors import TrainError
from megatron_train.tasks.task import Batch

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
        """Return the configuration of a checkpoint's record in the fields of today."""
        return config_of(record).to_dict()

    @property
    def stages(self) -> Sequence[CausalModel]:
        """This rank's stages."""
        return self._stages

    @property
    def inner_losses(self) -> Sequence[str]:
        """Names of the losses of routers, if the model has any."""
        return self._stages[0].config.inner_losses

    def units(self, stage: nn.Module) -> Sequence[nn.Module]:
        """The blocks of a stage."""
        return [block for own in self._stages if own is stage for block in own.layers.values()]

    def denominators(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the number of tokens that count; for routers, of those that are not padding."""
        counts = {LOSS: sum(float(batch["loss_mask"].double().sum()) for batch in batches)}
        if self.inner_losses:
            routed = float(sum(self._routed(batch) for batch in batches))
            counts |= dict.fromkeys(self.inner_losses, routed)
        return counts

    def _routed(self, batch: Batch) -> int:
        if self._reset_attention_mask:
            return int((batch["document_ids"] >= 0).sum())
        return batch["tokens"].numel()

    def cut(self, batch: Batch) -> Batch:
        """Return the batch at this rank's places, with the ``places`` of all ranks.

        What masks are made of stays whole: ``document_ids`` and ``sample_ids``.
        """
        tokens = batch["tokens"]
        if PLACES in batch and not self._mesh.layout.hybrid_cp:
            raise TrainError(
                f"samples have a field {PLACES!r}, which context parallelism gives them; rename it"
            )
        if self._mesh.layout.hybrid_cp:
            split = ContextSplit(batch[PLACES])
        elif self._cut_per_document:
            split = ContextSplit.per_document(batch["document_ids"], self._cp.size)
        else:
            split = ContextSplit.zigzag(tokens.shape[1], self._cp.size, tokens.device)
        index = self._context(split.ranks).index
        by_place = batch.keys() & {"tokens", "labels", "loss_mask", "positions"}
        own = {name: split.take(batch[name], index) for name in by_place}
        return {**batch, **own, PLACES: split.places}

    def inputs(self, batch: Batch, stage: int, iteration: int | None) -> Mapping[str, Any]:
        """Return tokens for the first stage, labels for the last, mask and dropout for all."""
        own = next(one for one in self._stages if one.stage == stage)
        given: dict[str, Any] = {}
        if own.first:
            given["x"] = batch["tokens"]
        if own.last:
            given["labels"] = batch["labels"]
            if iteration is not None:
                given["label_smoothing"] = self._label_smoothing
        pooled = self._mesh.layout.hybrid_cp
        if self._reset_position_ids or pooled:
            given["positions"] = batch["positions"]
        if self._reset_attention_mask or pooled:
            given["mask"] = Mask(document_ids=batch["document_ids"])
        if self._cp.size > 1 or pooled:
            given["split"] = ContextSplit(batch[PLACES])
        if pooled:
            given["cp"] = self._context(len(batch[PLACES]))
        if iteration is not None and (self._hidden_dropout or self._attention_dropout):
            given["dropout"] = self._dropout(batch, iteration)
        return given

    def _context(self, ranks: int) -> Axis:
        """The ranks that a micro-batch is cut over; of a pool, by their number."""
        pooled = self._mesh.layout.hybrid_cp
        return self._mesh.axis(pool_group_name(ranks)) if pooled else self._cp

    def _dropout(self, batch: Batch, iteration: int) -> Dropout:
        """What is dropped; in rows of a pool, as in the samples that they are made of."""
        rates = self._hidden_dropout, self._attention_dropout
        if self._mesh.layout.hybrid_cp:
            samples, places = batch["sample_ids"].t(), batch["sample_places"]
            key = DropoutKey.for_tokens(self._seed, iteration, samples, places.t())
            return Dropout(key, *rates, places, self._sequence_length)
        key = DropoutKey.for_batch(
            seed=self._seed,
            iteration=iteration,
            samples=batch["sample_ids"],
            positions=batch["tokens"].shape[1] * self._cp.size,
        )
        return Dropout(key, *rates)

    def passed(self, batch: Batch, stage: int) -> Passed:
        """Return shape and dtype of the activations between two stages."""
        samples, part = batch["tokens"].shape
        return self._stages[0].passed(samples, part * self._cp.size)

    def loss(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross entropy ``[b, s]`` summed over the tokens that count."""
        return {LOSS: (output * batch["loss_mask"]).sum()}

    def flops(self, batches: Sequence[Batch]) -> float:
        """Return the operations of a forward and backward pass over the batches."""
        config = self._stages[0].config
        if self._mesh.layout.hybrid_cp:
            tokens = sum(int(batch[EXTENT][1]) for batch in batches)
            return float(training_flops(config, self._sequence_length or 0, tokens))
        length = batches[0]["tokens"].shape[1]
        tokens = sum(batch["tokens"].numel() for batch in batches)
        return float(training_flops(config, length, tokens))
