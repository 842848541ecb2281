"""``megatron-train layout``: draws the groups of ranks of a layout without starting them."""

import argparse

from megatron_parallel import ParallelLayout
from megatron_parallel.mesh import draw_layout

from megatron_train.config.flags import Parser, add_options, given_flags
from megatron_train.config.options import options_of
from megatron_train.config.run import build_section
from megatron_train.errors import UsageError


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "draw the groups of ranks of a parallel layout"
    parser = commands.add_parser("layout", help=summary, description=summary.capitalize() + ".")
    parser.add_argument(
        "--world-size", type=int, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--order",
        default=ParallelLayout.order,
        metavar="AXES",
        help="axes from the fastest to the slowest varying coordinate",
    )
    add_options(parser, options_of(ParallelLayout, "layout"), {"layout": "parallel layout"})
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the drawing of the layout."""
    if arguments.world_size < 1:
        raise UsageError(f"--world-size must be positive, got {arguments.world_size}")
    values = given_flags(arguments, options_of(ParallelLayout, "layout"))
    layout = build_section("layout", ParallelLayout, values, order=arguments.order)
    print(draw_layout(layout.resolve(arguments.world_size)))
    return 0
