"""``megatron-train pretrain KIND``: trains a model from scratch, or continues a run."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from megatron_train.cli.model_command import add_model_command
from megatron_train.config.dump import format_config
from megatron_train.config.flags import Parser, add_run_options, notes_on_ignored_flags
from megatron_train.config.ignored import settings_without_effect
from megatron_train.config.options import Option
from megatron_train.config.resolve import resolve
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options, sections
from megatron_train.config.values import Values
from megatron_train.errors import UsageError
from megatron_train.tokenizer import TokenizerCache

Resolver = Callable[[argparse.Namespace, int | None, TokenizerCache], tuple[RunConfig, Values]]
"""Returns the configuration of a run from a command line and the number of ranks to start."""

_EXAMPLE = """\
example:
  megatron-train pretrain {kind} --num-layers 4 --hidden-size 256 --num-attention-heads 4 \\
    --seq-length 256 --micro-batch-size 8 --train-iters 500 --lr 1e-3 \\
    --train-data-path corpus_text_document --valid-data-path valid_text_document \\
    --tokenizer-model tokenizer.json --save run --load run --save-interval 100
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    add_model_command(
        commands,
        "pretrain",
        "train a model from scratch, or continue a run",
        add_flags=_add_flags,
        usage="[--config FILE] [flags]",
        description="Train {summary}. Flags override --config, which overrides --recipe, "
        "which overrides the defaults.",
        example=_EXAMPLE,
        run=run,
        resolve=resolve,
    )


def _add_flags(kind: str, parser: Parser) -> None:
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="included settings of a whole run, see megatron-train recipes list",
    )
    titles = {name: title for name, (title, _) in sections(kind).items()}
    add_run_flags(parser, run_options(kind), titles)


def add_run_flags(parser: Parser, options: Sequence[Option], titles: Mapping[str, str]) -> None:
    """Adds the flags of a command that trains.

    Args:
        parser: Parser of the command.
        options: Options of a run.
        titles: Titles of sections by name.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, by section")
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        help="start and supervise N ranks on this machine, as torchrun does [default 1]",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings as YAML for --config, with their origins, and exit",
    )
    add_run_options(parser, options, titles)


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 0, or 128 plus the number of the signal that stopped the run."""
    ranks = ranks_to_start(arguments.nproc_per_node)
    resolved: Resolver = arguments.resolve
    tokenizers = TokenizerCache()
    config, values = resolved(arguments, ranks if ranks > 1 else None, tokenizers)
    if arguments.print_notes and os.environ.get("RANK", "0") == "0":
        for line in (*notes_on_ignored_flags(arguments), *settings_without_effect(config, values)):
            sys.stderr.write(f"megatron-train: note: {line}\n")
    if arguments.print_config:
        sys.stdout.write(format_config(config, values))
        return 0
    if ranks > 1:
        return _run_ranks(arguments.words, ranks, config)
    from megatron_train.pretrain import train

    command = shlex.join(["megatron-train", *arguments.words])
    return train(config, values, command=command, tokenizers=tokenizers)


def ranks_to_start(text: str | None) -> int:
    """Returns the value of --nproc-per-node; 1 if it is not given.

    Raises:
        UsageError: The value is not a positive integer, or another program started the ranks.
    """
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc-per-node needs a positive integer, got {text!r}")
    size = os.environ.get("WORLD_SIZE")
    if size is not None:
        raise UsageError(
            f"--nproc-per-node {text}: this process is already one of {size} ranks (WORLD_SIZE is "
            "set, for example by torchrun); leave out the flag or torchrun"
        )
    return int(text)


def _run_ranks(words: list[str], ranks: int, config: RunConfig) -> int:
    """Starts ranks with the same arguments and prints one line for their first error."""
    from megatron_train.launch.environment import cuda_defaults
    from megatron_train.launch.launch import launch

    timeout = config.training.distributed_timeout_minutes * 60
    fully_sharded = config.data_parallel.use_torch_fsdp2
    defaults = cuda_defaults(config.layout, fully_sharded=fully_sharded)
    program = [sys.executable, "-P", "-m", "megatron_train.cli.rank"]
    outcome = launch(program, words, ranks, timeout=timeout, defaults=defaults)
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")  # erase the rest of a killed progress bar
    sys.stderr.write(outcome.details)
    if outcome.interrupted:
        sys.stderr.write("megatron-train: interrupted\n")
    elif outcome.message:
        sys.stderr.write(f"megatron-train: error: {outcome.message}\n")
    return outcome.status
