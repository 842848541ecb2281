"""Models of one trunk, decoders and encoders, whole or as one pipeline stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import megatron_parallel
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask, takes_lengths
from megatron_parallel import (
    AuxiliaryLosses,
    Axis,
    Mesh,
    RecomputeConfig,
    initialize_parameters,
)
from megatron_parallel.context_parallel import ContextSplit, check_length
from megatron_parallel.pipeline import PassInterleaver
from torch import Tensor, device, nn

from megatron_models.cache import KVCache
from megatron_models.components.attention.context_parallel import (
    ContextParallel,
    check_context_parallel,
)
from megatron_models.components.attention.span import EVERYTHING
from megatron_models.components.context import Context
from megatron_models.components.dropout import Dropout, StageDropout
from megatron_models.components.embedding.output import Output
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.moe.replay import RouterReplay
from megatron_models.components.rotary.module import RotaryTables
from megatron_models.components.trunk import Trunk
from megatron_models.errors import ConfigError
from megatron_models.models.trunk_config import TrunkConfig
from megatron_models.placement import Placement
from megatron_models.stages import StagePlan, sequence_shard_length


@dataclass(frozen=True, eq=False, kw_only=True)
class PassOptions:
    """Options of a forward pass that all stages get; see `megatron_models.GPT.forward`."""

    positions: Int[Tensor, "*axes b s"] | None = None
    dropout: Dropout | None = None
    cache: KVCache | None = None
    split: ContextSplit | None = None
    cp: Axis | None = None
    auxiliary_losses: AuxiliaryLosses | None = None
    interleaver: PassInterleaver | None = None
    router_replay: RouterReplay | None = None
    padding: Bool[Tensor, "b s"] | None = None


class EncoderOutput(NamedTuple):
    """What the last stage of an encoder, or of a decoder with a task head, returns.

    Attributes:
        tokens: With a head of masked language modelling the loss of each token ``[b, s]``, or
            without labels the logits ``[s, b, padded vocabulary / tp]``. Without logits the
            stream ``[s, b, h]``, or this rank's part of it.
        sequences: Output of the head of sequences ``[b, n]`` on every rank: the logits of the
            binary head or of the task head, or the pooled vectors. None without such a head. With
            context parallelism a loss of it must count on one rank of the axis alone.
    """

    tokens: Float[Tensor, "..."]
    sequences: Float[Tensor, "b n"] | None


class TrunkModel(Trunk):
    """A model of one trunk, cut over the axes of a mesh: what decoders and encoders share.

    Args:
        config: The model's configuration.
        placement: Mesh, dtype, device and options.
        plan: The layers of this stage.
        stage: This stage's part of the trunk.
        further: Trunks of this stage beside its own layers, whose passes share masks and rotary
            tables with them.

    Attributes:
        stage: Index of this stage in the pipeline; 0 for a whole model.
        first: Whether it takes tokens.
        last: Whether it has the end of the model.
        layers: The blocks, by global layer number.

    Raises:
        LayoutError: The layout cannot cut the layers or does not support the recomputation.
        ConfigError: ``cp_comm_type`` is unknown.
    """

    def __init__(
        self,
        config: TrunkConfig,
        placement: Placement,
        plan: StagePlan,
        stage: TrunkSpec,
        further: Sequence[TrunkSpec] = (),
    ) -> None:
        mesh = placement.mesh
        placement.recompute.check(mesh.layout, sequence_parallel=placement.sequence_parallel)
        cp_comm_type = check_context_parallel(
            config.mixers, config.num_layers, mesh.layout, placement.cp_comm_type
        )
        super().__init__(stage, placement)
        self.config = config
        self.mesh, self.dtype = mesh, placement.dtype
        self.recompute, self.vocabulary_loss = placement.recompute, placement.bound_vocabulary_loss
        self.sequence_parallel, self.sequence_parallel_size = (
            placement.sequence_parallel,
            placement.sequence_parallel_size,
        )
        self.cp, self.backend = mesh.axis("cp"), placement.backend
        self.takes_lengths = takes_lengths(placement.backend("attention"))
        # Further layers communicate like the last of the model.
        self.cp_comm_type = (*cp_comm_type, *cp_comm_type[-1:] * len(further))
        self.stage, self.first, self.last = plan.stage, plan.first, plan.last
        parts = (stage, *further)
        rotations = dict.fromkeys(rotation for part in parts for rotation in part.rotations())
        self.rotary = RotaryTables(tuple(rotations), config.max_position_embeddings, placement)
        mixers = [mixer for part in parts for mixer in part.mixers]
        self.reads_padding = any(mixer.reads_padding for mixer in mixers)
        self.recurrent = any(mixer.recurrent for mixer in mixers)
        self.spans = tuple(dict.fromkeys(span for part in parts for span in part.spans()))

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

    def units(self) -> list[nn.Module]:
        """Returns the modules that fully sharded training gathers one at a time."""
        return [*self.layers.values()]

    def prepare(
        self, x: Int[Tensor, "b s"] | Float[Tensor, "part b h"], mask: Mask, options: PassOptions
    ) -> Context:
        """Returns the state that the layers of a pass share.

        Args:
            x: Input of this stage.
            mask: Mask of the whole sequence, or of cached and new tokens together.
            options: Options of the pass.

        Raises:
            ConfigError: The options exclude each other, or do not fit the input or the ranks.
        """
        cache, split, cp, positions = options.cache, options.split, options.cp, options.positions
        self._check_positions(positions)
        whole = cache is not None
        length = self._sequence_length(x, whole)
        offset = 0 if cache is None else cache.length
        end = offset + length
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
            dropped = self._dropout(options.dropout, cache, own)
            parallel = ContextParallel(
                self.mesh, cp, self.cp_comm_type, split, mask, dropped, self.backend
            )
            if positions is None:
                positions = mask.positions
                positions = own if positions is None else split.take(positions, cp.index)
        else:
            dropped = self._dropout(options.dropout, cache)
            if positions is None and mask.query_positions is not None:
                positions = mask.query_positions
            elif positions is None and mask.positions is not None:
                positions = mask.positions[:, offset:end]
            masks = {
                span: mask.narrowed(span.window, span.chunk).prepare(
                    length, end, offset, device=x.device, read_lengths=self.takes_lengths
                )
                for span in self.spans
                if span != EVERYTHING
            }
            mask = mask.prepare(length, end, offset, device=x.device)
        # Cached keys of one sequence need one rule of scaling, that of the longest sequence.
        context_length = None if whole else length * cp.size
        all_of_row = length * cp.size if over_ranks else end
        documents = self._documents(mask, offset, all_of_row, options.padding)
        return Context(
            mask,
            self.rotary(length, offset, positions, context_length),
            cache,
            offset,
            dropped,
            parallel,
            RecomputeConfig() if whole else self.recompute,  # recomputation would add keys twice
            self._padding(mask, offset, end, cp if over_ranks else None, split),
            options.auxiliary_losses,
            options.interleaver,
            sequence_parallel=False if whole else None,
            router_replay=options.router_replay,
            masks=masks,
            positions=positions,
            document_ids=documents,
            continues=_continues(mask, offset, documents),
        )

    def _check_positions(self, positions: Tensor | None) -> None:
        """Refuses positions with axes that the model does not have."""
        if positions is None or positions.ndim == 2:
            return
        axes = self.config.has_position_axes
        if not axes or positions.ndim != 3 or len(positions) != 3:
            expected = "[b, s] or [3, b, s]" if axes else "[b, s], without axes (mrope)"
            raise ConfigError(f"positions are {list(positions.shape)}; this model takes {expected}")

    def _padding(
        self, mask: Mask, offset: int, end: int, cp: Axis | None, split: ContextSplit | None
    ) -> Bool[Tensor, "s b"] | None:
        """Returns which tokens are padding; None if the mask has none or no mixer reads it."""
        if mask.document_ids is None or not self.reads_padding:
            return None
        if mask.query_document_ids is not None:
            ids = mask.query_document_ids
        elif split is not None and cp is not None:
            ids = split.take(mask.document_ids, cp.index)
        else:
            ids = mask.document_ids[:, offset:end]
        return (ids < 0).t()

    def _documents(
        self, mask: Mask, offset: int, end: int, padding: Bool[Tensor, "b s"] | None
    ) -> Int[Tensor, "b s"] | None:
        """Returns the document of each token of the sequence; None if no layer reads it."""
        if not self.recurrent:
            return None
        if padding is not None:
            return -padding.int()
        if mask.query_document_ids is not None:
            return mask.query_document_ids
        return None if mask.document_ids is None else mask.document_ids[:, offset:end]

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

    def tied_output(self, num_slices: int = 1, bias: Tensor | None = None) -> Output:
        """Returns the token embeddings of the last stage as output layer.

        Raises:
            ConfigError: This stage has no embedding.
        """
        if self.embedding is None:
            raise ConfigError(f"stage {self.stage} is not the last and has no output layer")
        tied: Output = partial(self.embedding.word.output, num_slices=num_slices, bias=bias)
        return tied


def _continues(
    mask: Mask, offset: int, documents: Int[Tensor, "b s"] | None
) -> Bool[Tensor, " b"] | None:
    """Returns whether the first new token is of the document of the last cached one."""
    ids = mask.document_ids
    if documents is None or ids is None or offset == 0:
        return None
    return ids[:, offset - 1] == documents[:, 0]


def trunk_stage(
    trunk: TrunkSpec, plan: StagePlan, *, tied_output: bool, embeds_again: bool = False
) -> TrunkSpec:
    """Returns one stage of a trunk.

    The first and the last stage both hold a tied weight. If the last stage embeds tokens too, both
    hold the whole embedding.

    Args:
        trunk: The trunk of the model.
        plan: The layers of the stage.
        tied_output: Whether the token embeddings are the output matrix too.
        embeds_again: Whether the last stage embeds tokens, as with multi-token prediction.
    """
    stage = trunk.stage(plan.layers, first=plan.first, last=plan.last)
    on_last = tied_output or embeds_again
    if trunk.embedding is None or not (plan.first or (plan.last and on_last)):
        return stage
    embedding = replace(
        trunk.embedding,
        is_output_weight=plan.last and tied_output,
        tied_over_stages=on_last and plan.count > 1,
        positions_tied_over_stages=embeds_again and plan.count > 1,
        output_only=not (plan.first or embeds_again),
    )
    return replace(stage, embedding=embedding)


Stage = TypeVar("Stage", bound=TrunkModel)


def build_chunks(
    model: Callable[..., Stage],
    config: TrunkConfig,
    placement: Placement | Mesh,
    split: Sequence[range] | None,
    seed: int,
) -> list[Stage]:
    """Builds this rank's stages, one for each of its ``vpp`` model chunks.

    If the first and the last stage are both on this rank (a pipeline in a V), embeddings of both
    are the same parameters.

    Args:
        model: Class of the stages.
        config: The model's configuration.
        placement: Mesh, dtype, device and options.
        split: Global layer numbers of every pipeline stage, or None.
        seed: Seed of the initial weights.
    """
    placement = Placement.resolve(placement)
    numbers = range(placement.mesh.layout.vpp)
    chunks = [model(config, placement, chunk=chunk, split=split, seed=seed) for chunk in numbers]
    _share_embeddings(chunks)
    return chunks


def _share_embeddings(chunks: Sequence[TrunkModel]) -> None:
    """Makes embeddings of the first and the last stage the same parameters if one rank has both."""
    first, last = chunks[0], chunks[-1]
    if first.first and not first.last and last.last and first.embedding and last.embedding:
        last.embedding.word = first.embedding.word
        if last.embedding.position is not None:
            last.embedding.position = first.embedding.position
