"""``megatron-train plan KIND --count``: sizes and costs of a run that is not started."""

import argparse
import json
import sys

from megatron_train.cli.model_command import add_model_command
from megatron_train.cli.run_source import add_run_source
from megatron_train.config.flags import Parser
from megatron_train.config.plan import resolve_plan
from megatron_train.errors import UsageError
from megatron_train.plan.count import count, format_count

_EXAMPLE = """\
example:
  megatron-train plan gpt --count --recipe llama3.2-1b --vocab-size 128256 --bf16 \\
    --world-size 8 --pipeline-model-parallel-size 2
  megatron-train plan gpt --count --hf-config Qwen3-8B/config.json --seq-length 4096
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    add_model_command(
        commands,
        "plan",
        "compute sizes and costs of a run without starting it",
        add_flags=_add_flags,
        usage="--count [--recipe NAME | --hf-config FILE] [flags]",
        description="Plan the training of {summary}. Takes the flags of megatron-train "
        "pretrain; data, tokenizer and lengths of training may be left out.",
        example=_EXAMPLE,
        run=run,
    )


def _add_flags(kind: str, parser: Parser) -> None:
    what = parser.add_argument_group("what to compute")
    what.add_argument(
        "--count",
        action="store_true",
        help="parameters, active parameters, operations, and memory of a rank",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, and operations")
    add_run_source(parser, kind)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; returns 0."""
    if not arguments.count:
        raise UsageError("say what to compute: --count")
    planned = resolve_plan(arguments)
    found = count(planned)
    if arguments.json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2) + "\n")
        return 0
    for line in format_count(planned, found):
        sys.stdout.write(line + "\n")
    return 0
