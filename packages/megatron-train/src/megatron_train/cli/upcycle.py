"""``megatron-train upcycle``: makes a checkpoint with experts from that of a dense model."""

import argparse
import sys

from megatron_models import UPCYCLING_REFUSED

from megatron_train.config.flags import Parser, add_options, given_flags
from megatron_train.config.options import Option
from megatron_train.config.run_sections import run_options
from megatron_train.errors import UsageError

_EXAMPLE = """\
example:
  megatron-train upcycle --load dense --save mixture --num-experts 8 --moe-router-topk 2
  megatron-train upcycle --load dense --save mixture --num-experts 64 --moe-router-topk 8 \\
    --moe-upcycling-granularity 8
  megatron-train finetune gpt --pretrained-checkpoint mixture ...
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "make a checkpoint with experts from that of a dense model (upcycling)"
    parser = commands.add_parser(
        "upcycle",
        usage="%(prog)s --load DIR --save DIR --num-experts N [flags]",
        help=summary,
        description=summary.capitalize() + ". The new model computes the function of the dense "
        "one: each expert is a copy of the feed-forward layer or a slice of it, scaled so that the "
        "outputs of a token's experts add up to that of the layer. Routers are random.",
        epilog=_EXAMPLE,
        flags=_add_flags,
    )
    parser.set_defaults(run=_upcycle)


def _add_flags(parser: Parser) -> None:
    text = "folder of checkpoints, whose newest one is read, or one checkpoint"
    parser.add_argument("--load", required=True, metavar="DIR", help=text)
    text = "folder to save the new checkpoint into, without optimizer state"
    parser.add_argument("--save", required=True, metavar="DIR", help=text)
    text = "slices that the feed-forward width is cut into, each an expert [default 1]"
    parser.add_argument("--moe-upcycling-granularity", metavar="N", default="1", help=text)
    text = "seed of the routers [default 1234]"
    parser.add_argument("--seed", metavar="N", default="1234", help=text)
    text = "family of the new model [default: that of the dense model, if it has such experts]"
    parser.add_argument("--model-family", metavar="TEXT", help=text)
    add_options(parser, _options(), {"model": "experts"})


def _options() -> tuple[Option, ...]:
    """Returns the options of experts that keep the function of the dense model."""
    return tuple(
        option
        for option in run_options("gpt")
        if option.section == "model"
        and (option.name == "num_experts" or option.name.startswith("moe_"))
        and option.name not in UPCYCLING_REFUSED
    )


def _upcycle(arguments: argparse.Namespace) -> int:
    from megatron_train.upcycling import upcycle_checkpoint

    given = given_flags(arguments, _options())
    changes = {key.partition(".")[2]: value.value for key, value in given.given.items()}
    made = upcycle_checkpoint(
        arguments.load,
        arguments.save,
        changes,
        granularity=_number(arguments.moe_upcycling_granularity, "--moe-upcycling-granularity"),
        seed=_number(arguments.seed, "--seed"),
        family=arguments.model_family,
    )
    if made.lost_family is not None:
        sys.stdout.write(
            f"the family {made.lost_family} has no models with these experts; the checkpoint names "
            "no family\n"
        )
    if not made.exact:
        sys.stdout.write(
            "the weights of a token's experts have no fixed sum with this router, so outputs equal "
            "those of the dense model only for equal logits of the router\n"
        )
    sys.stdout.write(f"saved upcycled checkpoint {made.path}\n")
    return 0


def _number(text: str, flag: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{flag} needs an integer, got {text!r}")
    return int(text)
