"""GPT: a decoder-only transformer, whole or as one pipeline stage."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import megatron_parallel
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import AuxiliaryLosses, Axis, Mesh, RecomputeConfig, initialize_parameters
from megatron_parallel.context_parallel import ContextSplit, check_length
from megatron_parallel.pipeline import PassInterleaver
from megatron_parallel.tensor_parallel import NUM_SLICES, ColumnParallelLinear, overlap_forward
from torch import Tensor, device, nn

from megatron_models.cache import KVCache
from megatron_models.components.attention.context_parallel import (
    ContextParallel,
    check_context_parallel,
)
from megatron_models.components.attention.span import EVERYTHING
from megatron_models.components.context import Context
from megatron_models.components.dropout import Dropout, StageDropout
from megatron_models.components.embedding.output import (
    Output,
    output_logits,
    select_tokens,
    token_losses,
)
from megatron_models.components.embedding.spec import output_spec
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.moe.replay import RouterReplay
from megatron_models.components.multi_token.module import MultiTokenPrediction
from megatron_models.components.multi_token.tokens import FutureTokens
from megatron_models.components.rotary.module import RotaryTables
from megatron_models.components.trunk import Trunk
from megatron_models.errors import ConfigError
from megatron_models.models.causal_model import CausalModel
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.placement import Placement
from megatron_models.stages import StagePlan, plan_stage, sequence_shard_length


class GPT(Trunk, CausalModel):
    """A decoder-only transformer, cut over the tensor-parallel and pipeline axes of a mesh.

    On a mesh with ``pp=1`` it is the whole model. Otherwise it is one stage: the first stage has
    the embedding, the last has the final norm and the output layer. All stages have the parameter
    names of the whole model. A tied weight is ``embedding.word.weight`` on the first and on the
    last stage. With multi-token prediction the last stage has its layers, and holds the whole
    embedding like the first.

    Initial weights depend on the seed and each parameter's global name, not on the layout. On the
    meta device the model has no values; call `initialize` after moving it with ``to_empty``.

    Args:
        config: The model's configuration.
        placement: Mesh, dtype, device and options. A mesh alone is short for `Placement(mesh)`.
        chunk: Index of the model chunk among this rank's ``vpp``, in the order of
            ``mesh.layout.stages``.
        split: Global layer numbers of every pipeline stage, in order. By default all stages have
            equally many layers. `split_layers` of `megatron_parallel.pipeline` makes uneven splits.
        seed: Seed of the initial weights.

    Attributes:
        stage: Index of this stage in the pipeline; 0 for a whole model.
        first: Whether it takes tokens.
        last: Whether it returns logits and losses.
        layers: The blocks, by global layer number.
        mtp: The layers of multi-token prediction on the last stage, or None.

    Raises:
        LayoutError: Query groups, feed-forward width or heads do not divide over the tensor axis,
            heads over the context axis, or layers over the stages; or the layout does not support
            the recomputation.
        ConfigError: The chunk does not exist, the split does not fit the pipeline, or
            ``cp_comm_type`` is unknown.
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
        cp_comm_type = check_context_parallel(
            config.mixers, config.num_layers, mesh.layout, placement.cp_comm_type
        )
        plan = plan_stage(config, mesh.layout, mesh.axis("pp").index, chunk, split)
        stage = _of_stage(config, plan)
        super().__init__(stage, placement)
        self.config: GPTConfig = config
        self.mesh, self.dtype = mesh, placement.dtype
        self.recompute, self.vocabulary_loss = placement.recompute, placement.vocabulary_loss
        self.sequence_parallel, self.sequence_parallel_size = (
            placement.sequence_parallel,
            placement.sequence_parallel_size,
        )
        self.cp = mesh.axis("cp")
        # The layers of multi-token prediction communicate like the last of the model.
        self.cp_comm_type = (*cp_comm_type, *cp_comm_type[-1:] * config.mtp_num_layers)
        self.stage, self.first, self.last = plan.stage, plan.first, plan.last
        multi_token = config.multi_token() if plan.last else ()
        parts = (stage, *(spec.trunk for spec in multi_token))
        rotations = dict.fromkeys(rotation for part in parts for rotation in part.rotations())
        self.rotary = RotaryTables(tuple(rotations), config.max_position_embeddings, placement)
        self.reads_padding = any(mixer.reads_padding for part in parts for mixer in part.mixers)
        self.spans = tuple(dict.fromkeys(span for part in parts for span in part.spans()))
        self.output: ColumnParallelLinear | None = None
        if plan.last and config.output() is not None:
            self.output = placement.column_parallel_linear(output_spec(config))
        self.mtp = MultiTokenPrediction(multi_token, placement) if multi_token else None
        self.num_slices = NUM_SLICES if placement.tp_comm_overlap else 1
        overlap_forward(self, self.num_slices)
        if placement.resolved_device.type != "meta":
            self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Initializes every parameter, and computes the rotary tables."""
        initialize_parameters(self, seed=seed, mesh=self.mesh)
        self.rotary.reset()

    def stage_output_spec(
        self, batch_size: int, sequence_length: int
    ) -> "megatron_parallel.TensorSpec":
        """Returns shape and dtype of the output of a stage that is not the last.

        Args:
            batch_size: Sequences of the micro-batch.
            sequence_length: Length of the whole sequence, in tokens.

        Raises:
            LayoutError: Context parallelism cannot cut the length.
            ConfigError: Sequence parallelism cannot cut the length.
        """
        if self.cp.size > 1:
            check_length(sequence_length, self.cp.size)
        part = sequence_shard_length(sequence_length // self.cp.size, self.sequence_parallel_size)
        # Looked up here, since it imports torch's pipelining and compiler, which takes seconds.
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
        router_replay: RouterReplay | None = None,
        future: FutureTokens | None = None,
    ) -> Float[Tensor, "..."]:
        """Runs this stage.

        All stages of a pipeline are called with the same arguments except ``x``. With context
        parallelism, tokens, labels and positions are those of this rank's part of the sequence
        (`ContextSplit.take`); mask and dropout are those of the whole sequence.

        With a cache no sequence is cut: sequence parallelism is inactive, and every tensor- and
        context-parallel rank gets all tokens and stores keys and values of all of them, for its
        heads.

        Args:
            x: Tokens ``[b, s]`` on the first stage. On others the output of the previous stage,
                ``[s, b, h]`` or, with sequence parallelism and no cache, ``[s/tp, b, h]``.
            labels: Token to predict at each index; -100 marks a token without loss. Only the last
                stage reads them.
            positions: Position of each token, for its embedding or rotation. Defaults to those of
                the mask, or without any to the token indices, counted from the cache's length.
            mask: Attention mask. Defaults to causal. With a cache it describes cached and new
                tokens together.
            dropout: Dropout. Defaults to none, in training and evaluation mode.
            cache: Keys and values of earlier tokens, to which those of these tokens are added.
            split: Indices of the sequence that each context-parallel rank holds. Defaults to a
                zig-zag over the whole sequence.
            cp: The axis that cuts this micro-batch, if axes are chosen for each micro-batch
                (`ParallelLayout.hybrid_cp`). Defaults to the mesh's axis ``cp``. The rows may then
                be longer than sequences, provided that ``positions`` are given.
            auxiliary_losses: Collects the losses of routers in training. Defaults to no such
                losses.
            interleaver: The interleaver of a `megatron_parallel.PipelineEngine`, which lets another
                micro-batch compute while the tokens of experts are in flight. The dispatcher must
                be ``alltoall``.
            label_smoothing: Share of the loss that is spread over all tokens of the vocabulary; see
                `megatron_parallel.vocab_parallel_cross_entropy`.
            logits_at: Indices among these tokens whose logits are computed, 0 to s - 1, ``k`` for
                each sequence. Defaults to all. Only the last stage reads them. Excludes labels.
            router_replay: Records or replays the experts of each token. Defaults to neither.
            future: Tokens and labels of multi-token prediction on this rank, whose losses are
                added to ``auxiliary_losses``. Only the last stage reads them. Defaults to no such
                losses.

        Returns:
            Activations shaped like the ``x`` of a later stage. From the last stage the loss of each
            token, minus the log-probability of its label in nats, ``[b, s]``; or without labels the
            logits ``[s, b, padded vocabulary / tp]``, or ``[k, b, ...]`` with ``logits_at``. Logits
            of padding are -inf.

        Raises:
            ConfigError: Labels are combined with ``logits_at``, or dropout or a cut sequence
                (``split``, ``cp``) with a cache; there are more tokens than positions of the model
                or room in the cache; sequence parallelism cannot cut the length; a split is for
                other ranks; a later stage gets tokens or the first stage activations.
        """
        whole = cache is not None
        length = self._sequence_length(x, whole)
        offset = 0 if cache is None else cache.length
        end = offset + length
        mask = Mask() if mask is None else mask
        parallel, masks = None, {}
        of_parts = cp is not None and positions is not None
        if whole and (cp is not None or split is not None):
            raise ConfigError("cache and split exclude each other: decoding cuts no sequence")
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
                positions = mask.positions
                positions = own if positions is None else split.take(positions, cp.index)
        else:
            dropped = self._dropout(dropout, cache)
            if positions is None and mask.query_positions is not None:
                positions = mask.query_positions
            elif positions is None and mask.positions is not None:
                positions = mask.positions[:, offset:end]
            masks = {
                span: mask.narrowed(span.window, span.chunk).prepare(
                    length, end, offset, device=x.device
                )
                for span in self.spans
                if span != EVERYTHING
            }
            mask = mask.prepare(length, end, offset, device=x.device)
        # Cached keys of one sequence need one rule of scaling, that of the longest sequence.
        context_length = None if whole else length * cp.size
        angles = self.rotary(length, offset, positions, context_length)
        padding = self._padding(mask, offset, end, cp if over_ranks else None, split)
        context = Context(
            mask,
            angles,
            cache,
            offset,
            dropped,
            parallel,
            RecomputeConfig() if whole else self.recompute,  # recomputation would add keys twice
            padding,
            auxiliary_losses,
            interleaver,
            sequence_parallel=False if whole else None,
            router_replay=router_replay,
            masks=masks,
            positions=positions,
        )
        x = super().forward(x, context, positions)
        if not self.last:
            return x
        output, config, cut = self._output(), self.config, context.sequence_parallel
        if labels is not None:
            if logits_at is not None:
                raise ConfigError(
                    "labels and logits_at exclude each other: a loss needs all tokens"
                )
            losses_of = partial(
                token_losses,
                output,
                config=config,
                loss=self.vocabulary_loss,
                label_smoothing=label_smoothing,
                sequence_parallel=cut,
            )
            losses = losses_of(x, labels)
            if future is None or self.mtp is None or self.embedding is None:
                return losses
            return self.mtp.attach_losses(losses, x, future, self.embedding, context, losses_of)
        if logits_at is None:
            return output_logits(output, x, config, self.tp, sequence_parallel=cut)
        x = select_tokens(
            x, logits_at, self.tp if self.sequence_parallel_size > 1 and not whole else None
        )
        logits = output_logits(output, x, config, self.tp, sequence_parallel=cut)
        return logits[: logits_at.shape[1]]

    def units(self) -> list[nn.Module]:
        """Returns the layers, with those of multi-token prediction."""
        return [*super().units(), *(self.mtp or ())]

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
        """Returns the loss of each token of a whole model, with the arguments of `forward`.

        Raises:
            ConfigError: This is one stage of several.
        """
        if not (self.first and self.last):
            raise ConfigError(
                f"stage {self.stage} is not a whole model; run it with a PipelineEngine"
            )
        return self.forward(
            tokens, labels=labels, positions=positions, mask=mask, dropout=dropout, split=split
        )

    def _padding(
        self, mask: Mask, offset: int, end: int, cp: Axis | None, split: ContextSplit | None
    ) -> Bool[Tensor, "s b"] | None:
        """Returns which tokens are padding; None if the mask has none or no router reads it."""
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
        """Returns the tokens of this tensor-parallel group, from tokens or activations."""
        if x.is_floating_point() == self.first:
            expected = "tokens [b, s]" if self.first else "activations [s, b, h]"
            raise ConfigError(f"stage {self.stage} takes {expected}, not {x.dtype} {list(x.shape)}")
        parts = 1 if whole else self.sequence_parallel_size
        if self.first:
            length = x.shape[1]
            sequence_shard_length(length, parts)
            return length
        return x.shape[0] * parts

    @staticmethod
    def _split(split: ContextSplit | None, part: int, cp: Axis, on: device) -> ContextSplit:
        """Returns the indices of each context-parallel rank; this rank holds `part` of them."""
        ranks = cp.size
        if split is None:
            split = ContextSplit.zigzag(part * ranks, ranks, on)
        if (split.ranks, split.local_length) != (ranks, part):
            raise ConfigError(
                f"{part} tokens on one of {ranks} context-parallel ranks do not fit a split "
                f"into {split.ranks} parts of {split.local_length}"
            )
        return split

    def _dropout(
        self, dropout: Dropout | None, cache: KVCache | None, indices: Tensor | None = None
    ) -> StageDropout | None:
        if dropout is None:
            return None
        if cache is not None:
            raise ConfigError("dropout and cache exclude each other: decoding has no dropout")
        return StageDropout.from_dropout(
            dropout, self.tp if self.sequence_parallel else None, indices
        )

    def _output(self) -> Output:
        """Returns the output layer, or the token embeddings that it is tied to."""
        if self.output is not None:
            return self.output
        if self.embedding is None:
            raise ConfigError(f"stage {self.stage} is not the last and has no output layer")
        tied: Output = partial(self.embedding.word.output, num_slices=self.num_slices)
        return tied


def gpt_chunks(
    config: GPTConfig,
    placement: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    seed: int = 1234,
) -> list[GPT]:
    """Builds this rank's stages, one `GPT` for each of its ``vpp`` model chunks.

    If the first and the last stage are both on this rank (a pipeline in a V), embeddings of both
    are the same parameters. Arguments and errors are those of `GPT`.
    """
    placement = Placement.resolve(placement)
    numbers = range(placement.mesh.layout.vpp)
    chunks = [GPT(config, placement, chunk=chunk, split=split, seed=seed) for chunk in numbers]
    first, last = chunks[0], chunks[-1]
    if first.first and not first.last and last.last and first.embedding and last.embedding:
        last.embedding.word = first.embedding.word
        if last.embedding.position is not None:
            last.embedding.position = first.embedding.position
    return chunks


def _of_stage(config: GPTConfig, plan: StagePlan) -> TrunkSpec:
    """Returns one stage of the trunk.

    The first and the last stage both hold a tied weight, and with multi-token prediction the whole
    embedding.
    """
    trunk, tied, embeds_again = config.trunk(), config.output() is None, config.mtp_num_layers > 0
    stage = trunk.stage(plan.layers, first=plan.first, last=plan.last)
    on_last = tied or embeds_again
    if trunk.embedding is None or not (plan.first or (plan.last and on_last)):
        return stage
    embedding = replace(
        trunk.embedding,
        is_output_weight=plan.last and tied,
        tied_over_stages=on_last and plan.count > 1,
        positions_tied_over_stages=embeds_again and plan.count > 1,
        output_only=not (plan.first or embeds_again),
    )
    return replace(stage, embedding=embedding)
