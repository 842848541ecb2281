"""BERT: an encoder that reads in both directions, whole or as one pipeline stage."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from megatron_kernels import Mask
from megatron_parallel import Mesh
from megatron_parallel.context_parallel import ContextSplit
from megatron_parallel.tensor_parallel import NUM_SLICES, overlap_forward
from torch import Tensor

from megatron_models.components.dropout import Dropout
from megatron_models.components.embedding.output import (
    check_labels,
    output_logits,
    token_losses,
)
from megatron_models.components.heads.module import SequenceHead
from megatron_models.components.masked_lm.module import MaskedLMHead
from megatron_models.components.masked_lm.spec import MaskedLMSpec
from megatron_models.errors import ConfigError
from megatron_models.models.bert.config import BertConfig
from megatron_models.models.trunk_model import (
    EncoderOutput,
    PassOptions,
    TrunkModel,
    build_chunks,
    trunk_stage,
)
from megatron_models.placement import Placement
from megatron_models.stages import plan_stage


class Bert(TrunkModel):
    """An encoder, cut over the tensor-parallel, context-parallel and pipeline axes of a mesh.

    On a mesh with ``pp=1`` it is the whole model. Otherwise it is one stage: the first stage has
    the embedding, the last has the final norm, if there is one, and the heads. All stages have the
    parameter names of the whole model. A tied weight is ``embedding.word.weight`` on the first and
    on the last stage.

    Initial weights depend on the seed and each parameter's global name, not on the layout. On the
    meta device the model has no values; call `initialize` after moving it with ``to_empty``.

    Args:
        config: The model's configuration.
        placement: Mesh, dtype, device and options. A mesh alone is short for `Placement(mesh)`.
        chunk: Index of the model chunk among this rank's ``vpp``, in the order of
            ``mesh.layout.stages``.
        split: Global layer numbers of every pipeline stage, in order. By default all stages have
            equally many layers.
        seed: Seed of the initial weights.

    Attributes:
        lm_head: The head of masked language modelling on the last stage, or None.
        sequence_head: Pooler with binary head, or task head, on the last stage, or None.

    Raises:
        LayoutError: The layout cannot cut the model or does not support the recomputation.
        ConfigError: The chunk does not exist, the split does not fit the pipeline, or
            ``cp_comm_type`` is unknown.
    """

    config: BertConfig

    def __init__(
        self,
        config: BertConfig,
        placement: Placement | Mesh,
        *,
        chunk: int = 0,
        split: Sequence[range] | None = None,
        seed: int = 1234,
    ) -> None:
        placement = Placement.resolve(placement)
        mesh = placement.mesh
        plan = plan_stage(config, mesh.layout, mesh.axis("pp").index, chunk, split)
        stage = trunk_stage(config.trunk(), plan, tied_output=config.predicts_tokens)
        super().__init__(config, placement, plan, stage)
        self.lm_head: MaskedLMHead | None = None
        self.sequence_head: SequenceHead | None = None
        if plan.last:
            if config.predicts_tokens:
                self.lm_head = MaskedLMHead(config.component(MaskedLMSpec), placement)
            if config.head_of_sequences is not None:
                self.sequence_head = SequenceHead(config.head_of_sequences, placement)
        self.num_slices = NUM_SLICES if placement.tp_comm_overlap else 1
        overlap_forward(self, self.num_slices)
        self.initialize(seed)

    def forward(  # type: ignore[override]
        self,
        x: Int[Tensor, "b s"] | Float[Tensor, "part b h"],
        *,
        token_types: Int[Tensor, "b s"] | None = None,
        labels: Int[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "b s"] | None = None,
        mask: Mask | None = None,
        dropout: Dropout | None = None,
        split: ContextSplit | None = None,
        logits_at: Int[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "part b h"] | EncoderOutput:
        """Runs this stage.

        All stages of a pipeline are called with the same arguments except ``x``. With context
        parallelism, tokens, types, labels and positions are those of this rank's part of the
        sequence (`ContextSplit.take`); mask and dropout are those of the whole sequence.

        Args:
            x: Tokens ``[b, s]`` on the first stage. On others the output of the previous stage,
                ``[s, b, h]`` or, with sequence parallelism, ``[s/tp, b, h]``.
            token_types: Type of each token. Only the first stage reads them. Defaults to 0.
            labels: Token to predict at each index; -100 marks a token without loss. Only the last
                stage reads them.
            positions: Position of each token, from 0. Defaults to those of the mask, or without any
                to the token indices.
            mask: Attention mask, ``Mask(causal=False, document_ids=ids)`` with -1 for padding.
                Defaults to attention of all tokens to all.
            dropout: Dropout. Defaults to none, in training and evaluation mode.
            split: Indices of the sequence that each context-parallel rank holds. Defaults to a
                zig-zag over the whole sequence.
            logits_at: Indices among these tokens whose logits are computed, ``k`` for each
                sequence. Defaults to all. Only the last stage reads them. Excludes labels.

        Returns:
            Activations shaped like the ``x`` of a later stage, or from the last stage an
            `EncoderOutput`.

        Raises:
            ConfigError: The mask is causal; labels are combined with ``logits_at``, or given to a
                model without logits; there are more tokens than positions of the model; sequence
                parallelism cannot cut the length; a split is for other ranks; a later stage gets
                tokens or the first stage activations.
        """
        mask = Mask(causal=False) if mask is None else mask
        if mask.causal:
            raise ConfigError("an encoder reads in both directions; use Mask(causal=False)")
        options = PassOptions(positions=positions, dropout=dropout, split=split)
        context = self.prepare(x, mask, options)
        x = super().forward(x, context, context.positions, token_types)
        if not self.last:
            return x
        sequences = None
        if self.sequence_head is not None:
            sequences = self.sequence_head(x, mask, context)
        return EncoderOutput(self._of_tokens(x, labels, logits_at), sequences)

    def _of_tokens(
        self, x: Tensor, labels: Tensor | None, logits_at: Tensor | None
    ) -> Float[Tensor, "..."]:
        """Returns losses, logits, or without a head the stream itself."""
        if self.lm_head is None:
            if labels is not None or logits_at is not None:
                raise ConfigError(
                    "this encoder has no logits; leave labels and logits_at out, or build it with "
                    "masked_lm_head and without a task_head"
                )
            return x
        check_labels(labels, logits_at)
        head, config = self.lm_head, self.config
        output = self.tied_output(self.num_slices, head.bias)
        is_cut = self.sequence_parallel_size > 1
        if labels is not None:
            return token_losses(
                output, head(x), labels, config, self.vocabulary_loss, sequence_parallel=is_cut
            )
        return output_logits(output, x, config, self.tp, logits_at, is_cut=is_cut, head=head)


def bert_chunks(
    config: BertConfig,
    placement: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    seed: int = 1234,
) -> list[Bert]:
    """Builds this rank's stages, one `Bert` for each of its ``vpp`` model chunks.

    Arguments and errors are those of `Bert`.
    """
    return build_chunks(Bert, config, placement, split, seed)
