"""``megatron-infer generate``: continue texts with the model of a checkpoint."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer._command import Parser
from megatron_infer.cli.options import (
    add_model_options,
    add_sampling_options,
    load,
    sampling_params,
)
from megatron_infer.errors import InferError

if TYPE_CHECKING:
    from megatron_infer.engine.generate import Completion
    from megatron_infer.load import LoadedModel

ENDINGS = {
    "stop": "the document ended",
    "length": "--max-new-tokens reached",
    "positions": "the model has no more positions",
}


def add_parser(commands: Any) -> None:
    """Add the command ``generate``."""
    parser: Parser = commands.add_parser(
        "generate",
        help="continue texts with the model of a checkpoint",
        description="Continue texts with the model of a checkpoint. One prompt is printed as its "
        "text comes; several are continued together and printed in order.",
    )
    parser.set_defaults(run=run)
    add_model_options(parser)
    prompt = parser.add_argument_group("prompt, one of")
    sources = prompt.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated"
    )
    sources.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="file with one text; - is standard input"
    )
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Continue the prompts and print them."""
    params = sampling_params(arguments)
    prompts = arguments.prompt or [_read(arguments.prompt_file)]
    loaded = load(arguments)

    from megatron_infer.engine.generate import generate

    started = time.perf_counter()
    if len(prompts) == 1:
        _print(prompts[0])
        completions = generate(
            loaded.model, loaded.tokenizer, prompts, params, on_text=lambda _, text: _print(text)
        )
        _print("\n")
    else:
        completions = generate(loaded.model, loaded.tokenizer, prompts, params)
        for number, one in enumerate(completions, start=1):
            _print(f"--- {number} ---\n{one.prompt}{one.text}\n")
    _summarize(loaded, completions, time.perf_counter() - started)
    return 0


def _read(path: Path) -> str:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InferError(f"{path} is not UTF-8 text: {error}") from None
    if not text:
        raise InferError(f"{path} is empty: there is nothing to continue")
    return text


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _summarize(loaded: "LoadedModel", completions: "list[Completion]", seconds: float) -> None:
    tokens = sum(len(one.tokens) for one in completions)
    endings = dict.fromkeys(ENDINGS[one.finish_reason] for one in completions)
    print(
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), "
        f"{' and '.join(endings)}; {loaded.checkpoint.path} on {loaded.model.mesh.device}",
        file=sys.stderr,
    )
