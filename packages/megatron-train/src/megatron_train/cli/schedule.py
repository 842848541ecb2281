"""``megatron-train schedule``: draws the timeline of a pipeline schedule by simulation."""

import argparse
from pathlib import Path
from typing import Final

from megatron_parallel import LayoutError
from megatron_parallel.pipeline import (
    SCHEDULES,
    PassDurations,
    Timeline,
    draw_picture,
    draw_timeline,
    find_schedule_kind,
    simulate,
    summarize,
)

from megatron_train.config.flags import Parser
from megatron_train.errors import TrainError
from megatron_train.report.picture import check_picture_path, write_picture

_EXAMPLE = """\
example:
  megatron-train schedule --pipeline-schedule zb-v --pipeline-model-parallel-size 4 \\
    --micro-batches 8 --output zb-v.svg
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary_line = "draw the timeline of a pipeline schedule"
    parser = commands.add_parser(
        "schedule",
        help=summary_line,
        description=f"{summary_line.capitalize()} from a simulation with the given times. Shows "
        "the share of idle time and the maximum number of micro-batches in flight on each rank. "
        "F is a forward pass, B a backward pass, I and W its parts for input and weights; + "
        "joins interleaved passes; with virtual stages a letter names the stage.",
        epilog=_EXAMPLE,
    )
    parser.add_argument(
        "--pipeline-schedule",
        default="1f1b",
        choices=SCHEDULES,
        metavar="NAME",
        help=f"one of {', '.join(SCHEDULES)} [default 1f1b]",
    )
    parser.add_argument(
        "--pipeline-model-parallel-size",
        "--stages",
        type=int,
        required=True,
        metavar="P",
        help="number of pipeline ranks",
    )
    parser.add_argument(
        "--num-virtual-stages-per-pipeline-rank",
        type=int,
        metavar="V",
        help="stages of each rank [default: the minimum of the schedule]",
    )
    parser.add_argument(
        "--micro-batches", type=int, metavar="M", help="micro-batches in one step [default: 2 x P]"
    )
    parser.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=int,
        metavar="N",
        help="micro-batches that a stage runs in a row [default: the minimum of the schedule]",
    )
    for name, default, text in (
        ("forward", 1.0, "of a stage's forward pass"),
        ("backward", 2.0, "of a stage's backward pass"),
        ("weight", None, "of the weight part (W) of a split backward pass [default: half of it]"),
        ("send", 0.0, "from the end of a pass until its result is on another rank"),
    ):
        parser.add_argument(
            f"--{name}-time", type=float, default=default, metavar="T", help=f"time {text}"
        )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="picture to write, .svg or .png"
    )
    parser.set_defaults(run=run, parser=parser)


_FLAGS: Final = {
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "group_size": "--microbatch-group-size-per-virtual-pipeline-stage",
    "forward": "--forward-time",
    "backward": "--backward-time",
    "weight": "--weight-time",
    "send": "--send-time",
}
"""Flags by the fields that errors of a simulation name."""


def run(arguments: argparse.Namespace) -> int:
    """Prints the timeline and writes the picture.

    Raises:
        TrainError: The schedule cannot run these numbers; the message names the flags.
    """
    if arguments.output is not None:
        check_picture_path(arguments.output)
    try:
        timeline = _simulate(arguments)
    except LayoutError as error:
        raise TrainError(error.format_message(_FLAGS)) from None
    if arguments.output is None:
        print(draw_timeline(timeline))
        return 0
    try:
        print(draw_timeline(timeline))
    except LayoutError:  # too detailed for text
        print(summarize(timeline))
    write_picture(draw_picture(timeline), arguments.output)
    return 0


def _simulate(arguments: argparse.Namespace) -> Timeline:
    schedule, ranks = arguments.pipeline_schedule, arguments.pipeline_model_parallel_size
    chunks = arguments.num_virtual_stages_per_pipeline_rank
    if chunks is None:
        chunks = 1 if find_schedule_kind(schedule).supports(1) else 2
    count = 2 * ranks if arguments.micro_batches is None else arguments.micro_batches
    times = PassDurations(
        forward=arguments.forward_time,
        backward=arguments.backward_time,
        weight=arguments.weight_time,
        send=arguments.send_time,
    )
    group = arguments.microbatch_group_size_per_virtual_pipeline_stage
    return simulate(schedule, ranks, count, chunks, times, group)
