"""``megatron-train pretrain gpt``: train a GPT model from scratch, or continue a run."""

import argparse

from megatron_train.config.flags import Parser, add_options
from megatron_train.config.resolve import resolve
from megatron_train.config.run import SECTIONS, run_options

_EXAMPLE = """\
example:
  megatron-train pretrain gpt --num-layers 4 --hidden-size 256 --num-attention-heads 4 \\
    --seq-length 256 --micro-batch-size 8 --train-iters 500 --lr 1e-3 \\
    --train-data-path corpus_text_document --valid-data-path valid_text_document \\
    --tokenizer-model tokenizer.json --save run --load run --save-interval 100
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the command to ``commands``."""
    pretrain = commands.add_parser("pretrain", help="train a model from scratch, or continue a run")
    families = pretrain.add_subparsers(metavar="model", required=True)
    parser = families.add_parser(
        "gpt",
        usage="%(prog)s [--config FILE] [flags]",
        help="a decoder-only language model",
        description="Train a decoder-only language model. Flags override --config, which overrides "
        "the defaults.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, by section")
    add_options(parser, run_options(), {name: title for name, (title, _) in SECTIONS.items()})
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Train; returns 0, or 128 plus the number of the signal that stopped the run."""
    config, values = resolve(arguments)
    from megatron_train.pretrain import pretrain_gpt

    return pretrain_gpt(config, values)
