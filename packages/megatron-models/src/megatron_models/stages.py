"""Which part of a model a pipeline stage is, in pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_parallel import ParallelLayout, split_layers

from megatron_models.config import GPTConfig
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
    config: GPTConfig,
    layout: ParallelLayout,
    pipeline_rank: int,
    chunk: int = 0,
    split: Sequence[range] | None = None,
) -> StagePlan:
    """Find what stage ``layout.stages(pipeline_rank)[chunk]`` holds.

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
    if not 0 <= chunk < vpp:
        raise ConfigError(f"chunk {chunk} does not exist: the layout has vpp={vpp}")
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
    stage = layout.stages(pipeline_rank)[chunk]
    return StagePlan(stage, pp * vpp, split[stage])
