"""``megatron-train layout``: draws the groups of ranks of a layout without starting them."""

import argparse

from megatron_parallel import ParallelLayout
from megatron_parallel.mesh import draw_layout

from megatron_train.config.flags import (
    LAYERS_PER_VIRTUAL_STAGE,
    Parser,
    add_layers_per_virtual_stage,
    add_options,
    given_flags,
)
from megatron_train.config.options import options_of
from megatron_train.config.resolve import with_virtual_stages
from megatron_train.config.run import build_section
from megatron_train.config.values import GivenValue, Values
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
    groups = add_options(
        parser, options_of(ParallelLayout, "layout"), {"layout": "parallel layout"}
    )
    add_layers_per_virtual_stage(groups["layout"])
    groups["layout"].add_argument(
        "--num-layers",
        type=int,
        metavar="N",
        help=f"layers of the model, for {LAYERS_PER_VIRTUAL_STAGE}",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the drawing of the layout."""
    if arguments.world_size < 1:
        raise UsageError(f"--world-size must be positive, got {arguments.world_size}")
    values = given_flags(arguments, options_of(ParallelLayout, "layout"))
    values = with_virtual_stages(_with_layers(values, arguments), arguments)
    layout = build_section("layout", ParallelLayout, values, order=arguments.order)
    print(draw_layout(layout.resolve(arguments.world_size)))
    return 0


def _with_layers(values: Values, arguments: argparse.Namespace) -> Values:
    """Adds the number of layers, which only the layers of a virtual stage need.

    Raises:
        UsageError: One of both is missing, or the number is not positive.
    """
    layers = arguments.num_layers
    if (layers is None) != (arguments.num_layers_per_virtual_pipeline_stage is None):
        raise UsageError(
            f"--num-layers and {LAYERS_PER_VIRTUAL_STAGE} give the number of virtual stages "
            "together; give both or leave them out"
        )
    if layers is None:
        return values
    if layers < 1:
        raise UsageError(f"--num-layers must be positive, got {layers}")
    return values.updated(Values({"model.num_layers": GivenValue(layers, "--num-layers")}))
