"""``megatron-train finetune TASK``: trains the model of a checkpoint for a task."""

import argparse
from functools import partial

from megatron_train.cli.pretrain import add_run_flags, run
from megatron_train.config.extensions import kinds_for
from megatron_train.config.finetune import finetune_options, finetune_titles, resolve_finetuning
from megatron_train.config.flags import Parser
from megatron_train.tasks.kinds import TaskKind, task_kinds

_EXAMPLE = """\
example:
  megatron-train finetune gpt --pretrained-checkpoint run --seq-length 256 \\
    --micro-batch-size 8 --train-iters 100 --lr 1e-4 --train-data-path talks_text_document \\
    --valid-data-path valid_text_document --save tuned --load tuned --save-interval 50
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "train the model of a checkpoint for a task"
    finetune = commands.add_parser("finetune", help=summary, description=summary.capitalize() + ".")
    tasks = finetune.add_subparsers(metavar="TASK", required=True)
    for name, task in task_kinds().items():
        if kinds_for(name):
            _add_task(tasks, task)


def _add_task(tasks: "argparse._SubParsersAction[Parser]", task: TaskKind) -> None:
    parser = tasks.add_parser(
        task.name,
        megatron=True,
        flags=partial(_add_flags, task.name),
        usage="%(prog)s --pretrained-checkpoint FOLDER [--config FILE] [flags]",
        help=task.summary,
        description=f"Begin a new run with the weights of --pretrained-checkpoint: {task.summary}. "
        "Optimizer state, step and order of samples are new. Kind, family and settings of the "
        "model come from the checkpoint, and so does the tokenizer, unless another is given. A "
        "given setting of the model overrides the checkpoint's, if the weights fit it. The same "
        "command, given again, continues the run in --save or --load.",
        epilog=_EXAMPLE.replace("finetune gpt", f"finetune {task.name}"),
    )
    parser.set_defaults(run=run, resolve=resolve_finetuning, task=task.name)


def _add_flags(task: str, parser: Parser) -> None:
    add_run_flags(parser, finetune_options(task), finetune_titles(task))
