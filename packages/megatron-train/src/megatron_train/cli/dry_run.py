"""``megatron-train dry-run KIND``: memory and work of a step, without devices or other ranks."""

import argparse
import json
import os
import sys
from pathlib import Path

from megatron_parallel.imagined.guard import NoGuardError, load_guard

from megatron_train.cli.model_command import add_model_command
from megatron_train.cli.run_source import add_run_source
from megatron_train.config.described_run import resolve_run
from megatron_train.config.flags import Parser
from megatron_train.errors import TrainError, UsageError

_EXAMPLE = """\
example:
  megatron-train dry-run gpt --recipe gpt3-175b --world-size 1024 --output memory.png
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    add_model_command(
        commands,
        "dry-run",
        "run a step without devices, and report its memory and work",
        add_flags=_add_flags,
        usage="[--recipe NAME | --hf-config FILE]\n       [--world-size N] [flags]",
        description="Run a step of {summary} on tensors without values, for one rank of the "
        "first, a middle and the last pipeline stage of a job of any size. Takes the flags of "
        "megatron-train pretrain; data, tokenizer and lengths may be left out.",
        example=_EXAMPLE,
        run=run,
    )


def _add_flags(kind: str, parser: Parser) -> None:
    parser.add_argument(
        "--pipeline-ranks", metavar="P", nargs="+", help="pipeline ranks instead of these three"
    )
    parser.add_argument(
        "--on",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="device to imagine; auto is cuda if this machine can [default: auto]",
    )
    parser.add_argument("--output", metavar="FILE", help="draw the memory: a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_run_source(parser, kind)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 0."""
    planned = resolve_run(arguments)
    pipeline_ranks = _pipeline_ranks(arguments.pipeline_ranks, planned.layout.pp)
    output = None if arguments.output is None else Path(arguments.output)
    device, missing = _device(arguments.on)
    from tqdm import tqdm

    from megatron_train.dry_run.dry_run import dry_run
    from megatron_train.dry_run.picture import check_picture_path, draw_memory
    from megatron_train.dry_run.report import format_report, to_dict

    if output is not None:
        check_picture_path(output)
    with tqdm(total=len(pipeline_ranks), unit="rank", disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.update(done - bar.n)

        uses = dry_run(planned, device, pipeline_ranks, show, processes=_processes())
    if arguments.json:
        sys.stdout.write(json.dumps(to_dict(planned, uses, device), indent=2) + "\n")
    else:
        for line in format_report(planned, uses, device, missing):
            sys.stdout.write(line + "\n")
    if output is not None:
        draw_memory(planned, uses, output)
    return 0


def _device(wanted: str) -> tuple[str, str]:
    """Returns the device to imagine, and why it is not "cuda" if that is the reason."""
    if wanted == "cpu":
        return "cpu", ""
    try:
        load_guard()
    except NoGuardError as error:
        if _has_cuda():
            return "cuda", ""
        if wanted == "cuda":
            raise TrainError(f"--on cuda: {error}; give --on cpu") from None
        return "cpu", str(error)
    return "cuda", ""


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _processes() -> int:
    """Returns how many ranks run at once: one on each core, where processes can be forked."""
    if not hasattr(os, "fork"):
        return 1
    return os.cpu_count() or 1


def _pipeline_ranks(texts: list[str] | None, pp: int) -> tuple[int, ...]:
    if texts is None:
        return tuple(dict.fromkeys((0, pp // 2, pp - 1)))
    for text in texts:
        if not text.isdecimal() or int(text) >= pp:
            raise UsageError(f"--pipeline-ranks needs numbers from 0 to {pp - 1}, got {text!r}")
    return tuple(int(text) for text in texts)
