"""Assignment of layers to pipeline stages, in pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_parallel import ParallelLayout
from megatron_parallel.nearest import nearest, nearest_multiples
from megatron_parallel.pipeline import split_layers

from megatron_models.errors import ConfigError
from megatron_models.models.trunk_config import TrunkConfig


@dataclass(frozen=True)
class StagePlan:
    """The layers of one stage.

    Attributes:
        stage: Index of the stage.
        count: Number of stages.
        layers: Global numbers of the stage's layers.
    """

    stage: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which returns logits and losses."""
        return self.stage == self.count - 1


def plan_stage(
    config: TrunkConfig,
    layout: ParallelLayout,
    pipeline_rank: int,
    chunk: int = 0,
    split: Sequence[range] | None = None,
) -> StagePlan:
    """Returns the plan of stage ``layout.stages(pipeline_rank)[chunk]``.

    Args:
        config: The model's configuration.
        layout: Its ``pp`` and ``vpp`` determine the number of stages.
        pipeline_rank: Coordinate on the pipeline axis.
        chunk: Index of one of the ``vpp`` model chunks of that rank.
        split: Global layer numbers of every stage. Defaults to the model's own
            (`ModelConfig.stage_split`), or to equally many for all stages.

    Raises:
        ConfigError: The chunk does not exist, or the split is not every layer once, in order.
        LayoutError: Without a split, the layers do not divide over the stages.
    """
    pp, vpp = layout.pp, layout.vpp
    stage = _stage(layout, pipeline_rank, chunk)
    if split is None:
        split = config.stage_split(layout)
    if split is None:
        split = split_layers(config.num_layers, pp, vpp)
    _check_split(split, pp * vpp, config.num_layers)
    return StagePlan(stage, pp * vpp, split[stage])


@dataclass(frozen=True)
class EncoderDecoderStagePlan:
    """The layers of one stage of an encoder-decoder.

    The first ``encoder_stages`` stages of the pipeline belong to the encoder.

    Attributes:
        stage: Index of the stage in the pipeline.
        count: Number of stages of both sides.
        encoder_stages: Number of stages of the encoder.
        encoder: The stage among those of the encoder, or None.
        decoder: The stage among those of the decoder, or None.
    """

    stage: int
    count: int
    encoder_stages: int
    encoder: StagePlan | None
    decoder: StagePlan | None

    @property
    def embedding_stages(self) -> tuple[int, ...]:
        """The stages that embed tokens: the first of each side."""
        return (0, self.encoder_stages) if self.count > 1 else (0,)


def plan_encoder_decoder_stage(
    encoder_layers: int,
    decoder_layers: int,
    layout: ParallelLayout,
    pipeline_rank: int,
    chunk: int = 0,
    encoder_stages: int | None = None,
    split: Sequence[range] | None = None,
) -> EncoderDecoderStagePlan:
    """Returns the plan of an encoder-decoder's stage ``layout.stages(pipeline_rank)[chunk]``.

    The encoder's stages come first, as in Megatron. A single stage holds both sides.

    Args:
        encoder_layers: Number of encoder layers.
        decoder_layers: Number of decoder layers.
        layout: Its ``pp`` and ``vpp`` determine the number of stages.
        pipeline_rank: Coordinate on the pipeline axis.
        chunk: Index of one of the ``vpp`` model chunks of that rank.
        encoder_stages: Number of stages of the encoder. Defaults to half of them. The layers of
            each side are divided evenly over its stages.
        split: Layers of every stage instead, numbered over both sides: those of the decoder follow
            those of the encoder.

    Raises:
        ConfigError: The chunk does not exist, a side has no stage, its layers do not divide over
            its stages, or the split is not every layer once, in order, or has a stage of both.
    """
    count = layout.pp * layout.vpp
    stage = _stage(layout, pipeline_rank, chunk)
    if count == 1:
        if encoder_stages is not None:
            raise ConfigError(
                f"encoder_stages={encoder_stages} needs a pipeline; leave it out for 1 stage, "
                "which holds encoder and decoder"
            )
        return EncoderDecoderStagePlan(
            0, 1, 1, StagePlan(0, 1, range(encoder_layers)), StagePlan(0, 1, range(decoder_layers))
        )
    if split is not None and encoder_stages is not None:
        raise ConfigError("split and encoder_stages exclude each other; leave one out")
    if split is not None:
        return _split_sides(split, stage, count, encoder_layers, decoder_layers)
    first = count // 2 if encoder_stages is None else encoder_stages
    if not 0 < first < count:
        raise ConfigError(
            f"encoder_stages={first} of {count} stages leaves the encoder or the decoder without "
            f"a stage; use 1 to {count - 1}"
        )
    # Check both sides on every rank, so that all ranks fail together.
    encoder = _even_split("encoder", encoder_layers, first)
    decoder = _even_split("decoder", decoder_layers, count - first)
    if stage < first:
        of_encoder = StagePlan(stage, first, encoder[stage])
        return EncoderDecoderStagePlan(stage, count, first, of_encoder, None)
    own = stage - first
    of_decoder = StagePlan(own, count - first, decoder[own])
    return EncoderDecoderStagePlan(stage, count, first, None, of_decoder)


def _split_sides(
    split: Sequence[range], stage: int, count: int, encoder_layers: int, decoder_layers: int
) -> EncoderDecoderStagePlan:
    """Returns the plan of a stage of a split of both sides."""
    layers = encoder_layers + decoder_layers
    _check_split(split, count, layers)
    for number, own in enumerate(split):
        if own.start < encoder_layers < own.stop:
            even = [n for n in range(2, layers + 1) if encoder_layers * n % layers == 0]
            fitting = [n for n in even if layers % n == 0]
            use = f"use {nearest(fitting, count)} stages" if fitting else "give other stages"
            raise ConfigError(
                f"stage {number} of {count} has layers {own.start}:{own.stop}, of the encoder "
                f"(0:{encoder_layers}) and of the decoder ({encoder_layers}:{layers}); {use}"
            )
    first = sum(own.stop <= encoder_layers for own in split)
    own = split[stage]
    if stage < first:
        return EncoderDecoderStagePlan(stage, count, first, StagePlan(stage, first, own), None)
    inside = range(own.start - encoder_layers, own.stop - encoder_layers)
    of_decoder = StagePlan(stage - first, count - first, inside)
    return EncoderDecoderStagePlan(stage, count, first, None, of_decoder)


def _check_split(split: Sequence[range], count: int, layers: int) -> None:
    """Refuses a split of a pipeline that is not every layer once, in order."""
    if len(split) != count:
        raise ConfigError(f"the split has {len(split)} stages, but the pipeline has {count}")
    if list(chain.from_iterable(split)) != list(range(layers)):
        stages = ", ".join(f"{each.start}:{each.stop}" for each in split)
        raise ConfigError(
            f"stages of layers {stages} do not cover layers 0:{layers} in order, each "
            "once; use split_layers"
        )


def sequence_shard_length(length: int, parts: int) -> int:
    """Returns the tokens of a sequence on one of ``parts`` sequence-parallel ranks.

    Raises:
        ConfigError: The length is not divisible by ``parts``.
    """
    if length % parts:
        raise ConfigError(
            f"a sequence of {length} tokens cannot be divided over {parts} "
            f"sequence-parallel ranks; use {nearest_multiples(length, parts)} tokens"
        )
    return length // parts


def _stage(layout: ParallelLayout, pipeline_rank: int, chunk: int) -> int:
    """Returns the stage of a rank's model chunk."""
    if not 0 <= chunk < layout.vpp:
        raise ConfigError(f"chunk {chunk} does not exist: the layout has vpp={layout.vpp}")
    return layout.stages(pipeline_rank)[chunk]


def _even_split(half: str, layers: int, stages: int) -> tuple[range, ...]:
    """Returns the layers of each stage of an evenly divided side."""
    if layers % stages:
        raise ConfigError(
            f"the {half}'s {layers} layers do not divide evenly over its {stages} stages; use "
            f"{nearest_multiples(layers, stages)} layers or other encoder_stages"
        )
    return split_layers(layers, stages)
