"""Which part of a model a pipeline stage is, in pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_parallel import ParallelLayout
from megatron_parallel.pipeline import split_layers

from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError


@dataclass(frozen=True)
class StagePlan:
    """The place of a stage: number `stage` of `count`, with these global layer numbers."""

    stage: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        """Whether the model begins here: the stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the model ends here: the stage gives logits and losses."""
        return self.stage == self.count - 1


def plan_stage(
    config: StreamConfig,
    layout: ParallelLayout,
    pipeline_rank: int,
    chunk: int = 0,
    split: Sequence[range] | None = None,
) -> StagePlan:
    """Finds what stage ``layout.stages(pipeline_rank)[chunk]`` holds.

    Args:
        config: the model.
        layout: its ``pp`` and ``vpp`` count the stages.
        pipeline_rank: index on the pipeline axis.
        chunk: which of the ``vpp`` chunks of that rank.
        split: global layer numbers of every stage; by default all stages get equally many.

    Raises:
        ConfigError: no such chunk, or a split that is not every layer once, in order.
        LayoutError: without a split, layers that do not divide over the stages.
    """
    pp, vpp = layout.pp, layout.vpp
    stage = _stage(layout, pipeline_rank, chunk)
    if split is None:
        split = split_layers(config.num_layers, pp, vpp)
    if len(split) != pp * vpp:
        raise ConfigError(f"a split into {len(split)} stages was given for {pp * vpp} stages")
    if list(chain.from_iterable(split)) != list(range(config.num_layers)):
        stages = ", ".join(f"{each.start}:{each.stop}" for each in split)
        raise ConfigError(
            f"stages of layers {stages} are not layers 0:{config.num_layers}, each once and in "
            "order; make a split with split_layers"
        )
    return StagePlan(stage, pp * vpp, split[stage])


@dataclass(frozen=True)
class EncoderDecoderStagePlan:
    """Stage number `stage`, and its place in the encoder, the decoder, or both.

    The first `encoder_stages` of the pipeline are the encoder's.
    """

    stage: int
    encoder_stages: int
    encoder: StagePlan | None
    decoder: StagePlan | None


def plan_encoder_decoder_stage(
    encoder_layers: int,
    decoder_layers: int,
    layout: ParallelLayout,
    pipeline_rank: int,
    chunk: int = 0,
    encoder_stages: int | None = None,
) -> EncoderDecoderStagePlan:
    """Finds what stage ``layout.stages(pipeline_rank)[chunk]`` of encoder and decoder holds.

    The encoder's stages come first, as in Megatron; each half is cut evenly over its own. A single
    stage holds both.

    Args:
        encoder_layers: of the encoder.
        decoder_layers: of the decoder.
        layout: its ``pp`` and ``vpp`` count the stages.
        pipeline_rank: index on the pipeline axis.
        chunk: which of the ``vpp`` chunks of that rank.
        encoder_stages: how many of the stages the encoder has; by default half of them.

    Raises:
        ConfigError: no such chunk, a half without a stage, or layers that do not divide over the
            stages of their half.
    """
    count = layout.pp * layout.vpp
    stage = _stage(layout, pipeline_rank, chunk)
    if count == 1:
        if encoder_stages is not None:
            raise ConfigError(
                f"encoder_stages={encoder_stages} was given for 1 stage, which holds encoder and "
                "decoder; leave it out or use a pipeline"
            )
        return EncoderDecoderStagePlan(
            0, 1, StagePlan(0, 1, range(encoder_layers)), StagePlan(0, 1, range(decoder_layers))
        )
    first = count // 2 if encoder_stages is None else encoder_stages
    if not 0 < first < count:
        raise ConfigError(
            f"encoder_stages={first} of {count} stages leaves the encoder or the decoder without "
            f"one; use 1 to {count - 1}"
        )
    # Both on every rank, so that none goes on alone.
    encoder = _even_split("encoder", encoder_layers, first)
    decoder = _even_split("decoder", decoder_layers, count - first)
    if stage < first:
        return EncoderDecoderStagePlan(stage, first, StagePlan(stage, first, encoder[stage]), None)
    own = stage - first
    return EncoderDecoderStagePlan(stage, first, None, StagePlan(own, count - first, decoder[own]))


def sequence_shard_length(length: int, parts: int) -> int:
    """Tokens of a sequence that one of ``parts`` sequence-parallel ranks has in its stream.

    Raises:
        ConfigError: a length that cannot be cut into so many equal parts.
    """
    if length % parts:
        raise ConfigError(
            f"a sequence of {length} tokens cannot be cut into {parts} equal parts for "
            f"sequence parallelism; use a multiple of {parts}"
        )
    return length // parts


def _stage(layout: ParallelLayout, pipeline_rank: int, chunk: int) -> int:
    """Returns the number of a rank's chunk among the stages of the pipeline."""
    if not 0 <= chunk < layout.vpp:
        raise ConfigError(f"chunk {chunk} does not exist: the layout has vpp={layout.vpp}")
    return layout.stages(pipeline_rank)[chunk]


def _even_split(half: str, layers: int, stages: int) -> tuple[range, ...]:
    """Returns the layers of every stage of a half that is cut evenly."""
    if layers % stages:
        raise ConfigError(
            f"the {half}'s {layers} layers cannot be cut evenly over its {stages} stages; change "
            "the layers or encoder_stages"
        )
    return split_layers(layers, stages)
