"""GPT: a decoder-only transformer, whole or as one stage of a pipeline."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import megatron_parallel
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import AuxiliaryLosses, Axis, Mesh, RecomputeConfig, initialize_parameters
from megatron_parallel.context_parallel import ContextSplit, check_length
from megatron_parallel.pipeline import PassInterleaver
from megatron_parallel.tensor_parallel import NUM_SLICES, ColumnParallelLinear, overlap_forward
from torch import Tensor, device

from megatron_models.cache import KVCache
from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.attention.context_parallel import (
    ContextParallel,
    check_context_parallel,
)
from megatron_models.components.attention.rotary import RotaryTable
from megatron_models.components.context import Context
from megatron_models.components.dropout import Dropout, StageDropout
from megatron_models.components.embedding.output import (
    Output,
    mask_padding_logits,
    select_tokens,
    token_losses,
)
from megatron_models.components.embedding.spec import output_spec
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.trunk import Trunk
from megatron_models.errors import ConfigError
from megatron_models.models.causal_model import CausalModel
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.placement import Placement
from megatron_models.stages import StagePlan, plan_stage, sequence_shard_length


class GPT(Trunk, CausalModel):
    """A decoder-only transformer, cut over the tensor-parallel and pipeline axes of a mesh.

    On a mesh with ``pp=1`` it is the whole model. Otherwise it is one stage: the first embeds, the
    last has the final norm and the output layer, and all keep the whole model's parameter names.
    A tied weight is ``embedding.word.weight`` on the first and on the last stage.

    Initial weights depend on the seed and each parameter's global name, not on the layout. Built on
    the meta device the model has no values; call `initialize` after moving it with ``to_empty``.

    Args:
        config: the model's shape.
        placement: mesh, dtype, device and options; a mesh alone is short for
            `Placement(mesh)`.
        chunk: which of this rank's ``vpp`` stages, in the order of ``mesh.layout.stages``.
        split: global layer numbers of every stage of the pipeline, in order; by default all get
            equally many. `megatron_parallel.pipeline.split_layers` makes uneven ones.
        seed: of the initial weights.

    Attributes:
        stage: number of this stage in the pipeline; 0 for a whole model.
        first: whether it takes tokens.
        last: whether it gives logits and losses.
        layers: its blocks, by global layer number.

    Raises:
        LayoutError: query groups, feed-forward width or heads do not divide over the tensor axis,
            heads over the context axis, or layers over the stages; recomputation that the layout
            has no use for.
        ConfigError: a chunk or a split that the pipeline does not have; a ``cp_comm_type`` that
            there is not.
    """

    def __init__(
        self,
        config: GPTConfig,
        placement: Placement | Mesh,
        *,
        chunk: int = 0,
        split: Sequence[range] | None = None,
        seed: int = 1234,
    ) -> None:
        placement = Placement.resolve(placement)
        mesh = placement.mesh
        placement.recompute.check(mesh.layout, sequence_parallel=placement.sequence_parallel)
        cp_comm_type = check_context_parallel(config, mesh.layout, placement.cp_comm_type)
        plan = plan_stage(config, mesh.layout, mesh.axis("pp").index, chunk, split)
        super().__init__(_of_stage(config, plan), placement)
        self.config: GPTConfig = config
        self.mesh, self.dtype = mesh, placement.dtype
        self.recompute, self.vocabulary_loss = placement.recompute, placement.vocabulary_loss
        self.sequence_parallel, self.sequence_parallel_size = (
            placement.sequence_parallel,
            placement.sequence_parallel_size,
        )
        self.cp = mesh.axis("cp")
        self.cp_comm_type = cp_comm_type
        self.stage, self.first, self.last = plan.stage, plan.first, plan.last
        self.rotary: RotaryTable | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryTable(config.component(AttentionConfig), placement)
        self.output: ColumnParallelLinear | None = None
        if plan.last and config.output() is not None:
            self.output = placement.column_parallel_linear(output_spec(config))
        self.num_slices = NUM_SLICES if placement.tp_comm_overlap else 1
        overlap_forward(self, self.num_slices)
        if placement.resolved_device.type != "meta":
            self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Gives every parameter its initial value, and compute the rotary table."""
        initialize_parameters(self, seed=seed, mesh=self.mesh)
        if self.rotary is not None:
            self.rotary.reset()

    def stage_output_spec(
        self, batch_size: int, sequence_length: int
    ) -> "megatron_parallel.TensorSpec":
        """Returns what a stage that is not the last passes on for one micro-batch.

        Args:
            batch_size: sequences of the micro-batch.
            sequence_length: of the whole sequence, in tokens.

        Raises:
            LayoutError: context parallelism cannot cut that length.
            ConfigError: sequence parallelism cannot.
        """
        if self.cp.size > 1:
            check_length(sequence_length, self.cp.size)
        part = sequence_shard_length(sequence_length // self.cp.size, self.sequence_parallel_size)
        # Looked up here: it brings torch's pipelining and with it the compiler, seconds of a CPU.
        return megatron_parallel.TensorSpec((part, batch_size, self.config.hidden_size), self.dtype)

    def forward(  # type: ignore[override]
        self,
        x: Int[Tensor, "b s"] | Float[Tensor, "part b h"],
        *,
        labels: Int[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "b s"] | None = None,
        mask: Mask | None = None,
        dropout: Dropout | None = None,
        cache: KVCache | None = None,
        split: ContextSplit | None = None,
        cp: Axis | None = None,
        auxiliary_losses: AuxiliaryLosses | None = None,
        interleaver: PassInterleaver | None = None,
        label_smoothing: float = 0.0,
        logits_at: Int[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Runs this stage.

        All stages of a pipeline are called with the same arguments but ``x``. With context
        parallelism tokens, labels and positions are those at this rank's places of the sequence
        (`ContextSplit.take`); mask and dropout are those of the whole.

        With a cache no sequence is cut: sequence parallelism rests, and every tensor- and
        context-parallel rank is called with all of the tokens and keeps the keys and values of all
        of them, for its heads.

        Args:
            x: tokens ``[b, s]`` on the first stage; on others what the stage before returned,
                ``[s, b, h]`` or, with sequence parallelism and no cache, ``[s/tp, b, h]``.
            labels: the token to predict at each place; -100 marks a place without loss. Only the
                last stage reads them.
            positions: position of each token, for its embedding or rotation; by default those of
                the mask, and without any the tokens' places, counted from the cache's length.
            mask: who may attend to whom; by default every token to itself and those before. With a
                cache it describes cached and new tokens together.
            dropout: what is dropped; nothing by default, whether the module trains or evaluates.
            cache: keys and values of earlier tokens, to which those of these tokens are added.
            split: which places each context-parallel rank holds; by default a zig-zag over the
                whole sequence.
            cp: the ranks that this micro-batch is cut over, where they are chosen for each
                (`ParallelLayout.hybrid_cp`); by default those of the mesh's axis ``cp``. Its rows
                may be longer than sequences are, as long as ``positions`` are given.
            auxiliary_losses: takes the losses of routers, when training; without it there are none.
            interleaver: of a `megatron_parallel.PipelineEngine`: lets another micro-batch compute
                while experts' tokens are on their way; the dispatcher must be ``alltoall``.
            label_smoothing: share of the loss that all tokens of the vocabulary have in common; see
                `megatron_parallel.vocab_parallel_cross_entropy`.
            logits_at: places among these tokens for which logits are made, 0 to s - 1, ``k`` of
                each sequence; by default all. Only the last stage reads them. Not with labels.

        Returns:
            Activations like ``x`` of a later stage; from the last stage the loss of each token,
            minus the log-probability of its label in nats, ``[b, s]``, or without labels logits
            ``[s, b, padded vocabulary / tp]``, ``[k, b, ...]`` with ``logits_at``; those of padding
            tokens are -inf.

        Raises:
            ConfigError: labels together with ``logits_at``; more tokens than the model has
                positions, or the cache room; a length that sequence parallelism cannot cut; dropout
                or a cut sequence (``split``, ``cp``) together with a cache; a split for other
                ranks; tokens on a later stage or activations on the first.
        """
        whole = cache is not None
        length = self._sequence_length(x, whole)
        offset = 0 if cache is None else cache.length
        end = offset + length
        mask = Mask() if mask is None else mask
        parallel = None
        of_parts = cp is not None and positions is not None
        if whole and (cp is not None or split is not None):
            raise ConfigError("a cache was given together with a split: decoding cuts no sequence")
        cp = cp or self.cp
        over_ranks = cp.size > 1 and not whole
        if not of_parts:
            self.config.check_sequence_length(length * cp.size if over_ranks else end)
        if over_ranks:
            split = self._split(split, length, cp, x.device)
            own = split.indices[cp.index]
            dropped = self._dropout(dropout, cache, own)
            parallel = ContextParallel(self.mesh, cp, self.cp_comm_type, split, mask, dropped)
            if positions is None:
                given = mask.positions
                positions = own if given is None else split.take(given, cp.index)
        else:
            dropped = self._dropout(dropout, cache)
            if positions is None and mask.query_positions is not None:
                positions = mask.query_positions
            elif positions is None and mask.positions is not None:
                positions = mask.positions[:, offset:end]
            mask = mask.prepare(length, end, offset, device=x.device)
        angles = None if self.rotary is None else self.rotary(length, offset, positions)
        padding = self._padding(mask, offset, end, cp if over_ranks else None, split)
        context = Context(
            mask,
            angles,
            cache,
            offset,
            dropped,
            parallel,
            RecomputeConfig() if whole else self.recompute,  # a second run would add keys once more
            padding,
            auxiliary_losses,
            interleaver,
            sequence_parallel=False if whole else None,
        )
        x = super().forward(x, context, positions)
        if not self.last:
            return x
        output, vocab, cut = self._output(), self.config.vocab_size, context.sequence_parallel
        if labels is not None:
            if logits_at is not None:
                raise ConfigError(
                    "labels and logits_at exclude each other: a loss needs all places"
                )
            smoothed: Any = {"label_smoothing": label_smoothing, "sequence_parallel": cut}
            return token_losses(output, x, labels, vocab, self.vocabulary_loss, **smoothed)
        if logits_at is None:
            return mask_padding_logits(output(x, sequence_parallel=cut), self.tp, vocab)
        x = select_tokens(
            x, logits_at, self.tp if self.sequence_parallel_size > 1 and not whole else None
        )
        logits = output(x, sequence_parallel=cut)[: logits_at.shape[1]]
        return mask_padding_logits(logits, self.tp, vocab)

    def loss(
        self,
        tokens: Int[Tensor, "b s"],
        labels: Int[Tensor, "b s"],
        *,
        positions: Int[Tensor, "b s"] | None = None,
        mask: Mask | None = None,
        dropout: Dropout | None = None,
        split: ContextSplit | None = None,
    ) -> Float[Tensor, "b s"]:
        """Returns the loss of each token of a whole model; arguments as for `forward`.

        Raises:
            ConfigError: this is one stage of several.
        """
        if not (self.first and self.last):
            raise ConfigError(
                f"stage {self.stage} is not a whole model: run it with a PipelineEngine"
            )
        return self.forward(
            tokens, labels=labels, positions=positions, mask=mask, dropout=dropout, split=split
        )

    def _padding(
        self, mask: Mask, offset: int, end: int, cp: Axis | None, split: ContextSplit | None
    ) -> Bool[Tensor, "s b"] | None:
        """Returns where these tokens are padding; None if nothing says so or no router asks."""
        if mask.document_ids is None or not self.reads_padding:
            return None
        if mask.query_document_ids is not None:
            ids = mask.query_document_ids
        elif split is not None and cp is not None:
            ids = split.take(mask.document_ids, cp.index)
        else:
            ids = mask.document_ids[:, offset:end]
        return (ids < 0).t()

    def _sequence_length(self, x: Tensor, whole: bool) -> int:
        """Tokens that this rank and its tensor-parallel group hold, from tokens or activations."""
        if x.is_floating_point() == self.first:
            wanted = "tokens [b, s]" if self.first else "activations [s, b, h]"
            raise ConfigError(f"stage {self.stage} takes {wanted}, not {x.dtype} {list(x.shape)}")
        parts = 1 if whole else self.sequence_parallel_size
        if self.first:
            length = x.shape[1]
            sequence_shard_length(length, parts)
            return length
        return x.shape[0] * parts

    @staticmethod
    def _split(given: ContextSplit | None, part: int, cp: Axis, on: device) -> ContextSplit:
        """Which places of the sequence each context-parallel rank holds, `part` of them here."""
        ranks = cp.size
        split = ContextSplit.zigzag(part * ranks, ranks, on) if given is None else given
        if (split.ranks, split.local_length) != (ranks, part):
            raise ConfigError(
                f"{part} tokens were given on one of {ranks} context-parallel ranks, with a split "
                f"into {split.ranks} parts of {split.local_length}"
            )
        return split

    def _dropout(
        self, dropout: Dropout | None, cache: KVCache | None, indices: Tensor | None = None
    ) -> StageDropout | None:
        if dropout is None:
            return None
        if cache is not None:
            raise ConfigError("dropout was given together with a cache; decoding drops nothing")
        return StageDropout.from_dropout(
            dropout, self.tp if self.sequence_parallel else None, indices
        )

    def _output(self) -> Output:
        """Returns the output layer, or the token embeddings that it is tied to."""
        if self.output is not None:
            return self.output
        if self.embedding is None:
            raise ConfigError(f"stage {self.stage} is not the last: it has no output layer")
        tied: Output = partial(self.embedding.word.output, num_slices=self.num_slices)
        return tied


def gpt_chunks(
    config: GPTConfig,
    placement: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    seed: int = 1234,
) -> list[GPT]:
    """Builds all stages of this rank, one `GPT` for each of its ``vpp`` chunks.

    If the first and the last stage are both here (a pipeline in a V), they share a tied weight: it
    is one parameter, of both. Arguments and errors are those of `GPT`.
    """
    placement = Placement.resolve(placement)
    numbers = range(placement.mesh.layout.vpp)
    chunks = [GPT(config, placement, chunk=chunk, split=split, seed=seed) for chunk in numbers]
    first, last = chunks[0], chunks[-1]
    if first.first and not first.last and last.last and first.embedding and last.embedding:
        last.embedding.word = first.embedding.word
    return chunks


def _of_stage(config: GPTConfig, plan: StagePlan) -> TrunkSpec:
    """Returns what a stage has of the trunk; a tied weight is on the first and on the last."""
    trunk, tied = config.trunk(), config.output() is None
    stage = trunk.stage(plan.layers, first=plan.first, last=plan.last)
    if trunk.embedding is None or not (plan.first or (plan.last and tied)):
        return stage
    embedding = replace(
        trunk.embedding,
        is_output_weight=plan.last and tied,
        tied_over_stages=tied and plan.count > 1,
        output_only=not plan.first,
    )
    return replace(stage, embedding=embedding)
