"""Causal language modelling."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from megatron_kernels import Mask
from megatron_models import (
    CausalModel,
    Dropout,
    FutureTokens,
    Measure,
    counter_of,
    shift_within_documents,
    training_flops,
)
from megatron_parallel import Axis, DropoutKey
from megatron_parallel.context_parallel import ContextSplit
from megatron_parallel.mesh import pool_group_name
from torch import Tensor, nn

from megatron_train.config.run import RunConfig
from megatron_train.tasks.staged import StagedTask
from megatron_train.tasks.task import MicroBatch, field_sum, labels_with_loss

LOSS = "lm loss"

_FUTURE: Final[Mapping[str, str]] = {
    name: f"future_{name}" for name in ("tokens", "labels", "loss_mask", "positions")
}
"""Fields of sequences, and the same shifted for each depth of multi-token prediction."""


class GPTTask(StagedTask):
    """Predicts each next token; the loss is the cross entropy over the unmasked tokens.

    Args:
        stages: This rank's stages of the model; one without pipeline parallelism.
        family: Name of the model's family, recorded in checkpoints.
        seed: Seed of the dropout masks, which depend on the seed, the step and the sample number.
        hidden_dropout: Probability of dropping an element of a residual branch.
        attention_dropout: Probability of dropping an attention probability.
        reset_position_ids: Whether position ids come from the batch instead of counting from 0.
            They are ``[b, s]``, or for a model with ``mrope`` time, height and width of each token,
            ``[b, s, 3]``.
        reset_attention_mask: Whether tokens attend only within their own document.
        split_per_document: With context parallelism, whether each document is split over the ranks
            by itself, which balances their work, instead of the whole sequence.
        sequence_length: Length of the samples that rows are made of in a pool of ranks
            (`ParallelLayout.hybrid_cp`, `megatron_train.document_pool`).
        label_smoothing: Share of the training loss that is spread over all tokens of the
            vocabulary. Megatron-LM has it in its loss function but has no flag for it.
        per_layer_logging: Whether layers with experts count their load for reports.
    """

    losses = (LOSS,)
    metrics = ()

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
        split_per_document: bool = False,
        sequence_length: int | None = None,
        label_smoothing: float = 0.0,
        per_layer_logging: bool = False,
    ) -> None:
        super().__init__(
            stages,
            family,
            seed=seed,
            hidden_dropout=hidden_dropout,
            attention_dropout=attention_dropout,
        )
        self._reset_position_ids = reset_position_ids
        self._reset_attention_mask = reset_attention_mask
        self._split_per_document = split_per_document
        self._label_smoothing = label_smoothing
        self._config = stages[0].config
        self._counting = {
            layer: mixer
            for layer, mixer in self._config.counting_layers.items()
            if per_layer_logging or mixer.always_counts()
        }
        self._cp = self._mesh.axis("cp")
        self._sequence_length = sequence_length

    @property
    def auxiliary_losses(self) -> Sequence[str]:
        """Names of the losses of routers and of multi-token prediction, if the model has any."""
        return (*self._config.auxiliary_losses, *self._config.multi_token_losses)

    @property
    def counters(self) -> Mapping[str, int]:
        """The number of values that each layer with experts counts; empty unless asked for."""
        return {counter_of(layer): mixer.counters() for layer, mixer in self._counting.items()}

    def measures(self, counts: Mapping[str, Sequence[float]]) -> Mapping[int, Sequence[Measure]]:
        """Returns load, entropy and dropped share of each layer with experts."""
        return {
            layer: mixer.measures(counts[counter_of(layer)])
            for layer, mixer in self._counting.items()
            if counter_of(layer) in counts
        }

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float | Tensor]:
        """Returns the number of unmasked tokens; for losses of routers, of non-padding tokens.

        For a loss of multi-token prediction, it is the number of tokens with an unmasked label that
        many tokens later in the same document.
        """
        counts: dict[str, float | Tensor] = {LOSS: field_sum(batches, "loss_mask")}
        if self._config.auxiliary_losses:
            routed = sum(self._routed(batch) for batch in batches)
            counts |= dict.fromkeys(self._config.auxiliary_losses, routed)
        names = self._config.multi_token_losses
        for batch in batches if names else ():
            mask = self._shifted(batch.fields, batch.fields["loss_mask"]).double().sum((0, 1))
            found = mask.tolist() if mask.device.type == "cpu" else mask.unbind()
            for name, count in zip(names, found, strict=True):
                counts[name] = counts.get(name, 0.0) + count
        return counts

    def _shifted(self, fields: Mapping[str, Tensor], values: Tensor) -> Tensor:
        """Returns values of whole sequences, shifted for each depth of multi-token prediction.

        Documents are separate if tokens attend only within their own.
        """
        separate = self._reset_attention_mask or self._mesh.layout.hybrid_cp
        ids = fields["document_ids"] if separate else None
        return shift_within_documents(values, len(self._config.multi_token_losses), ids)

    def _with_future(self, batch: MicroBatch) -> MicroBatch:
        """Returns a micro-batch with the fields of multi-token prediction, if the model has it.

        They are shifted before sequences are cut, so that no rank needs tokens of another.
        """
        fields = batch.fields
        if not self._config.multi_token_losses or _FUTURE["tokens"] in fields:
            return batch
        values = {name: fields[name] for name in ("tokens", "labels", "loss_mask")}
        if self._reset_position_ids or self._mesh.layout.hybrid_cp:
            own = fields["positions"]
            values["positions"] = own if own.ndim == 2 else own[..., 0]  # embeddings have no axes
        else:
            tokens = fields["tokens"]
            indices = torch.arange(tokens.shape[1], device=tokens.device)
            values["positions"] = indices.expand(tokens.shape)
        found = {_FUTURE[name]: self._shifted(fields, value) for name, value in values.items()}
        return batch.with_fields(**found)

    def _routed(self, batch: MicroBatch) -> float | Tensor:
        if self._reset_attention_mask:
            count = (batch.fields["document_ids"] >= 0).sum()
            return float(count) if count.device.type == "cpu" else count
        return float(batch.fields["tokens"].numel())

    def context_parallel_slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this context-parallel rank's slice of a micro-batch.

        ``document_ids`` and ``sample_ids``, which attention and dropout masks are made from, stay
        whole.
        """
        batch = self._with_future(batch)
        fields, split = batch.fields, batch.context_split
        if split is None and self._split_per_document:
            split = ContextSplit.per_document(fields["document_ids"], self._cp.size)
        elif split is None:
            tokens = fields["tokens"]
            split = ContextSplit.zigzag(tokens.shape[1], self._cp.size, tokens.device)
            if self._reset_attention_mask:
                split = split.with_documents(fields["document_ids"])
        index = self._context(split.ranks).index
        sequence_fields = fields.keys() & {*_FUTURE, *_FUTURE.values()}
        own = {name: split.take(fields[name], index) for name in sequence_fields}
        return dataclasses.replace(batch.with_fields(**own), context_split=split)

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> Mapping[str, Any]:
        """Returns the keyword arguments of a stage.

        The first stage gets tokens, the last one labels, and all of them mask and dropout.
        """
        module = self._stage(stage)
        fields, arguments = batch.fields, dict[str, Any]()
        if module.first:
            arguments["x"] = fields["tokens"]
        if module.last:
            arguments["labels"] = labels_with_loss(fields)
            if iteration is not None:
                arguments["label_smoothing"] = self._label_smoothing
                if self._config.multi_token_losses:
                    known = dict(self._with_future(batch).fields)
                    known[_FUTURE["labels"]] = labels_with_loss(known, "future_")
                    arguments["future"] = FutureTokens(
                        **{name: known[field] for name, field in _FUTURE.items()}
                    )
        uses_pool = self._mesh.layout.hybrid_cp
        if self._reset_position_ids or uses_pool:
            own = fields["positions"]
            arguments["positions"] = own if own.ndim == 2 else own.permute(2, 0, 1)
        if self._reset_attention_mask or uses_pool:
            arguments["mask"] = Mask(document_ids=fields["document_ids"])
        if batch.context_split is not None:
            arguments["split"] = batch.context_split
            if uses_pool:
                arguments["cp"] = self._context(batch.context_split.ranks)
        return arguments | self._dropout(batch, iteration)

    def _context(self, ranks: int) -> Axis:
        """Returns the axis that a micro-batch is split over; in a pool, the group of `ranks`."""
        uses_pool = self._mesh.layout.hybrid_cp
        return self._mesh.axis(pool_group_name(ranks)) if uses_pool else self._cp

    def _dropout(self, batch: MicroBatch, iteration: int | None) -> dict[str, Dropout]:
        """Returns the dropout of a step; rows of a pool drop what their samples would drop."""
        uses_pool = self._mesh.layout.hybrid_cp
        if iteration is None or not self._drops(iteration) or not uses_pool:
            return super()._dropout(batch, iteration)
        samples, indices = batch.fields["sample_ids"].t(), batch.fields["indices_in_sample"]
        key = DropoutKey.for_tokens(self._seed, iteration, samples, indices.t())
        rates = self._hidden_dropout, self._attention_dropout
        return {"dropout": Dropout(key, *rates, indices, self._sequence_length)}

    def loss(self, output: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the cross entropy ``[b, s]`` summed over the unmasked tokens."""
        return {LOSS: (output * batch.fields["loss_mask"]).sum()}

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the FLOPs of a forward and backward pass over the micro-batches."""
        config, length = self._config, self._sequence_length
        if not self._mesh.layout.hybrid_cp:
            length = batches[0].fields["tokens"].shape[1]
        tokens = sum(batch.tokens for batch in batches)
        return float(training_flops(config, length or 0, tokens))


def gpt_task(run: RunConfig, stages: Sequence[nn.Module], family: str | None) -> GPTTask:
    """Returns the task of a run; see `megatron_train.tasks.kinds.TaskKind`."""
    training, data = run.training, run.data
    return GPTTask(
        cast(Sequence[CausalModel], stages),
        family,
        seed=training.seed,
        hidden_dropout=training.hidden_dropout,
        attention_dropout=training.attention_dropout,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        split_per_document=run.placement.context_parallel_split == "per_document",
        sequence_length=data.seq_length,
        per_layer_logging=run.logging.moe_per_layer_logging,
    )
