"""``megatron-infer generate``: continue texts with the model of a checkpoint."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer._command import Parser
from megatron_infer.cli.options import (
    add_model_options,
    add_sampling_options,
    load,
    load_for_tokens,
    sampling_params,
)
from megatron_infer.errors import InferError

if TYPE_CHECKING:
    from megatron_infer.engine.batch import Continuation
    from megatron_infer.engine.generate import Completion
    from megatron_infer.load import LoadedModel
    from megatron_infer.params import SamplingParams

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
    sources.add_argument(
        "--prompt-tokens",
        action="append",
        metavar="IDS",
        help="token ids to continue, such as '1 15 7'; token ids are printed too, and no tokenizer "
        "is needed; may be repeated",
    )
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Continue the prompts and print them."""
    params = sampling_params(arguments)
    if arguments.prompt_tokens:
        return _continue_tokens(arguments, params)
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


def _continue_tokens(arguments: argparse.Namespace, params: "SamplingParams") -> int:
    """Continue prompts of token ids and print all ids, those of one prompt as they come."""
    prompts = [_ids(text) for text in arguments.prompt_tokens]
    loaded = load_for_tokens(arguments)

    from megatron_infer.engine.batch import generate_tokens

    def show(_: int, token: int) -> None:
        _print(f" {token}")

    single = len(prompts) == 1
    started = time.perf_counter()
    if single:
        _print(" ".join(map(str, prompts[0])))
    found = generate_tokens(
        loaded.model,
        prompts,
        params,
        stop_tokens=loaded.stop_tokens,
        on_token=show if single else None,
    )
    if single:
        _print("\n")
    else:
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True), start=1):
            _print(f"--- {number} ---\n{' '.join(map(str, (*prompt, *one.tokens)))}\n")
    _summarize(loaded, found, time.perf_counter() - started)
    return 0


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            raise InferError(f"--prompt-tokens needs token ids such as '1 15 7', not {word!r}")
    return [int(word) for word in words]


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


def _summarize(
    loaded: "LoadedModel[Any]",
    completions: "Sequence[Completion | Continuation]",
    seconds: float,
) -> None:
    tokens = sum(len(one.tokens) for one in completions)
    endings = dict.fromkeys(ENDINGS[one.finish_reason] for one in completions)
    print(
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), "
        f"{' and '.join(endings)}; {loaded.checkpoint.path} on {loaded.model.mesh.device}",
        file=sys.stderr,
    )
