"""Decoder-only models of attention or recurrent layers, whole or as one pipeline stage."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import AuxiliaryLosses, Axis, Mesh
from megatron_parallel.context_parallel import ContextSplit
from megatron_parallel.pipeline import PassInterleaver
from megatron_parallel.tensor_parallel import NUM_SLICES, ColumnParallelLinear, overlap_forward
from torch import Tensor, nn

from megatron_models.cache import KVCache
from megatron_models.components.dropout import Dropout
from megatron_models.components.embedding.output import (
    Output,
    check_labels,
    output_logits,
    token_losses,
)
from megatron_models.components.embedding.spec import output_spec
from megatron_models.components.heads.module import SequenceHead
from megatron_models.components.moe.replay import RouterReplay
from megatron_models.components.multi_token.module import MultiTokenPrediction
from megatron_models.components.multi_token.tokens import FutureTokens
from megatron_models.errors import ConfigError
from megatron_models.models.causal_config import CausalConfig
from megatron_models.models.causal_model import CausalModel
from megatron_models.models.trunk_model import (
    EncoderOutput,
    PassOptions,
    TrunkModel,
    build_chunks,
    trunk_stage,
)
from megatron_models.placement import Placement
from megatron_models.stages import plan_stage


class GPT(TrunkModel, CausalModel):
    """A decoder-only model of any layers, cut over the tensor-parallel and pipeline axes of a mesh.

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
        sequence_head: The task head on the last stage, or None.

    Raises:
        LayoutError: Query groups, feed-forward width or heads do not divide over the tensor axis,
            heads over the context axis, or layers over the stages; or the layout does not support
            the recomputation.
        ConfigError: The chunk does not exist, the split does not fit the pipeline, or
            ``cp_comm_type`` is unknown.
    """

    config: CausalConfig

    def __init__(
        self,
        config: CausalConfig,
        placement: Placement | Mesh,
        *,
        chunk: int = 0,
        split: Sequence[range] | None = None,
        seed: int = 1234,
    ) -> None:
        placement = Placement.resolve(placement)
        mesh = placement.mesh
        plan = plan_stage(config, mesh.layout, mesh.axis("pp").index, chunk, split)
        multi_token = config.multi_token() if plan.last else ()
        stage = trunk_stage(
            config.trunk(),
            plan,
            tied_output=config.ties_output,
            embeds_again=bool(config.multi_token()),
        )
        super().__init__(config, placement, plan, stage, [spec.trunk for spec in multi_token])
        self.output: ColumnParallelLinear | None = None
        if plan.last and config.output() is not None:
            self.output = placement.column_parallel_linear(output_spec(config))
        self.mtp = MultiTokenPrediction(multi_token, placement) if multi_token else None
        self.sequence_head: SequenceHead | None = None
        if plan.last and config.head_of_sequences is not None:
            self.sequence_head = SequenceHead(config.head_of_sequences, placement)
        self.num_slices = NUM_SLICES if placement.tp_comm_overlap else 1
        overlap_forward(self, self.num_slices)
        self.initialize(seed)

    def forward(  # type: ignore[override]
        self,
        x: Int[Tensor, "b s"] | Float[Tensor, "part b h"],
        *,
        labels: Int[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "*axes b s"] | None = None,
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
        padding: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "..."] | EncoderOutput:
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
                A model with ``mrope`` takes time, height and width of each token too,
                ``[3, b, s]``; one position stands for three equal ones.
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
            padding: True for padding after the tokens of a sequence, with a cache and without
                document ids in the mask. Defaults to none, or to that of the document ids.

        Returns:
            Activations shaped like the ``x`` of a later stage. From the last stage the loss of each
            token, minus the log-probability of its label in nats, ``[b, s]``; or without labels the
            logits ``[s, b, padded vocabulary / tp]``, or ``[k, b, ...]`` with ``logits_at``. Logits
            of padding are -inf. With a task head an `EncoderOutput` with the stream.

        Raises:
            ConfigError: Labels are combined with ``logits_at``, or dropout or a cut sequence
                (``split``, ``cp``) with a cache; positions have axes that the model has not; there
                are more tokens than positions of the model or room in the cache; sequence
                parallelism cannot cut the length; a split is for other ranks; a later stage gets
                tokens or the first stage activations.
        """
        whole = cache is not None
        options = PassOptions(
            positions=positions,
            dropout=dropout,
            cache=cache,
            split=split,
            cp=cp,
            auxiliary_losses=auxiliary_losses,
            interleaver=interleaver,
            router_replay=router_replay,
            padding=padding,
        )
        mask = Mask() if mask is None else mask
        context = self.prepare(x, mask, options)
        x = super().forward(x, context, context.positions)
        if not self.last:
            return x
        if self.sequence_head is not None:
            if labels is not None or logits_at is not None:
                raise ConfigError(
                    "a model with a task_head has no logits; leave labels and logits_at out"
                )
            return EncoderOutput(x, self.sequence_head(x, mask, context))
        check_labels(labels, logits_at)
        output, config = self._output(), self.config
        is_cut = self.sequence_parallel_size > 1 and not whole
        if labels is not None:
            losses_of = partial(
                token_losses,
                output,
                config=config,
                loss=self.vocabulary_loss,
                label_smoothing=label_smoothing,
                sequence_parallel=is_cut,
            )
            losses = losses_of(x, labels)
            if future is None or self.mtp is None or self.embedding is None:
                return losses
            return self.mtp.attach_losses(losses, x, future, self.embedding, context, losses_of)
        return output_logits(output, x, config, self.tp, logits_at, is_cut=is_cut)

    def units(self) -> list[nn.Module]:
        """Returns the layers, with those of multi-token prediction."""
        return [*super().units(), *(self.mtp or ())]

    def loss(
        self,
        tokens: Int[Tensor, "b s"],
        labels: Int[Tensor, "b s"],
        *,
        positions: Int[Tensor, "*axes b s"] | None = None,
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
        losses: Tensor = self(
            tokens, labels=labels, positions=positions, mask=mask, dropout=dropout, split=split
        )
        return losses

    def _output(self) -> Output:
        """Returns the output layer, or the token embeddings that it is tied to."""
        if self.output is not None:
            return self.output
        return self.tied_output(self.num_slices)


def gpt_chunks(
    config: CausalConfig,
    placement: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    seed: int = 1234,
) -> list[GPT]:
    """Builds this rank's stages, one `GPT` for each of its ``vpp`` model chunks.

    Arguments and errors are those of `GPT`.
    """
    return build_chunks(GPT, config, placement, split, seed)
