"""Settings of a pipeline: its schedule and the layers of its stages."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.layout import ParallelLayout
from megatron_parallel.pipeline.layout_string import count_stages, parse_pipeline_layout
from megatron_parallel.pipeline.rules import (
    SCHEDULES,
    check_group_size,
    check_schedule,
    default_schedule,
    find_schedule_kind,
)
from megatron_parallel.pipeline.split import split_layers

COMBINED: Final = "combined-1f1b"
"""The schedule that hides the messages of experts; `overlap_experts` selects it."""


def _setting(default: Any, text: str, flag: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, "flag": flag, **metadata})


@dataclass(frozen=True)
class PipelineConfig:
    """Schedule and stage sizes; fields are named as in Megatron-LM where it has them.

    Raises:
        LayoutError: Settings exclude one another.
    """

    schedule: str | None = _setting(
        None,
        "order of the passes of a pipeline; defaults to 1f1b, or interleaved-1f1b with virtual "
        "stages (megatron-train schedule draws them; our name)",
        "--pipeline-schedule",
        choices=tuple(name for name in SCHEDULES if name != COMBINED),
    )
    group_size: int | None = _setting(
        None,
        "micro-batches that a virtual stage runs in a row, at least the number of pipeline ranks; "
        "longer groups hide more communication and save more activations; by default groups have "
        "equal lengths and are as short as possible",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        unit="micro-batches",
    )
    first: int | None = _setting(
        None,
        "layers of the first pipeline rank; the others share the rest equally",
        "--decoder-first-pipeline-num-layers",
        unit="layers",
    )
    last: int | None = _setting(
        None,
        "layers of the last pipeline rank; the others share the rest equally",
        "--decoder-last-pipeline-num-layers",
        unit="layers",
    )
    count_embedding: bool = _setting(
        False,
        "count the embedding as a layer when layers are split into stages",
        "--account-for-embedding-in-pipeline-split",
    )
    count_loss: bool = _setting(
        False,
        "count output layer and loss as a layer when layers are split into stages",
        "--account-for-loss-in-pipeline-split",
    )
    overlap_experts: bool = _setting(
        False,
        "run the forward pass of one micro-batch together with the backward pass of another: one "
        "computes while tokens of the other are sent to experts and back; with "
        "--moe-token-dispatcher-type alltoall, and without a pipeline too",
        "--overlap-moe-expert-parallel-comm",
    )
    stages: str | None = _setting(
        None,
        "layers of every stage: Et*3|(tt|)*2L is the embedding with 3 layers, two stages of 2 "
        "layers, then the loss; sets the number of virtual stages",
        "--pipeline-model-parallel-layout",
    )

    def __post_init__(self) -> None:
        ends = self.first is not None or self.last is not None
        if self.stages is not None and (ends or self.count_embedding or self.count_loss):
            raise LayoutError(
                "{stages:=} sets the number of layers of each stage: leave out {first:name}, "
                "{last:name}, {count_embedding:name} and {count_loss:name}",
                vars(self),
            )

        if self.overlap_experts and self.schedule is not None:
            raise LayoutError(
                f"{{overlap_experts:name}} runs {COMBINED} and excludes {{schedule:=}}: leave out "
                "one of them",
                vars(self),
            )
        if self.schedule == COMBINED:
            raise LayoutError(
                "{schedule:=} needs more than a name: use {overlap_experts:name} instead",
                vars(self),
            )

    def resolve_layout(self, layout: ParallelLayout) -> ParallelLayout:
        """Returns the layout with the stage mapping that the schedule needs.

        Raises:
            LayoutError: There are pipeline settings but no pipeline, or the schedule needs another
                number of chunks.
        """
        if layout.pp == 1:
            plain = vars(PipelineConfig(overlap_experts=self.overlap_experts))
            changed = [name for name, value in vars(self).items() if value != plain[name]]
            if changed:
                raise LayoutError(
                    f"{{{changed[0]}:=}} needs a pipeline of at least 2 ranks, not 1: leave it out",
                    vars(self),
                )
            return layout
        schedule = self.resolve_schedule(layout)
        check_schedule(schedule, layout.vpp)
        if self.group_size is not None:
            check_group_size(schedule, layout.pp, layout.vpp, self.group_size)
        return replace(layout, stage_mapping=find_schedule_kind(schedule).stage_mapping)

    def resolve_schedule(self, layout: ParallelLayout) -> str:
        """Returns the requested schedule, or the default one of the layout."""
        return COMBINED if self.overlap_experts else self.schedule or default_schedule(layout)

    def stage_layers(
        self, num_layers: int, layout: ParallelLayout, multi_token_layers: int = 0
    ) -> tuple[range, ...]:
        """Returns the global layer indices of every stage.

        Args:
            num_layers: Number of layers of the model.
            layout: The parallel sizes.
            multi_token_layers: Number of layers of multi-token prediction, which `stages` names.

        Raises:
            LayoutError: The layers cannot be split as requested; the error names the numbers.
        """
        pp, vpp = layout.pp, layout.vpp
        if self.stages is not None:
            count = count_stages(self.stages)
            if count != pp * vpp:
                raise LayoutError(
                    f"{{stages:=}} has {count} stages, but {pp} ranks x {vpp} chunks = "
                    f"{pp * vpp} stages",
                    vars(self),
                )
            return parse_pipeline_layout(self.stages, num_layers, pp, multi_token_layers)
        if layout.stage_mapping == "v" and (self.first is not None or self.last is not None):
            raise LayoutError(
                "in a V the first and the last stage are on one rank, so {first:name} and "
                "{last:name} have no effect: use {stages:name}",
                vars(self),
            )
        return split_layers(
            num_layers,
            pp,
            vpp,
            first=self.first,
            last=self.last,
            count_embedding=self.count_embedding,
            count_loss=self.count_loss,
        )
