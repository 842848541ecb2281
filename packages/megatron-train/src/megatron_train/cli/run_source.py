"""Options of commands that describe a run without starting it."""

from megatron_train.config.flags import Parser, add_run_options
from megatron_train.config.run_sections import run_options, sections


def add_run_source(parser: Parser, kind: str) -> None:
    """Adds the number of ranks, the sources of settings and all flags of ``pretrain KIND``."""
    parser.add_argument(
        "--world-size", metavar="N", help="number of ranks [default: those of one model replica]"
    )
    parser.add_argument("--nproc-per-node", metavar="N", help="the same as --world-size")
    parser.add_argument(
        "--hf-config",
        metavar="FILE",
        help="take the model from a config.json of Hugging Face, or the folder that contains it",
    )
    parser.add_argument("--recipe", metavar="NAME", help="included settings of a whole run")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, by section")
    titles = {name: title for name, (title, _) in sections(kind).items()}
    add_run_options(parser, run_options(kind), titles)
