"""``megatron-infer generate``: continue texts with the model of a checkpoint."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer._command import CommandError, Parser
from megatron_infer.cli.options import (
    add_model_options,
    add_sampling_options,
    load,
    load_for_tokens,
    sampling_params,
)
from megatron_infer.errors import InferError

if TYPE_CHECKING:
    from megatron_infer.engine.continuation import Continuation
    from megatron_infer.engine.generate import Completion
    from megatron_infer.load import LoadedModel

ENDINGS = {
    "stop": "the document ended",
    "length": "--max-new-tokens reached",
    "positions": "the model has no more positions",
}


def add_parser(commands: Any) -> None:
    """Adds the command ``generate``."""
    parser: Parser = commands.add_parser(
        "generate",
        help="continue texts with the model of a checkpoint",
        description="Continue texts with the model of a checkpoint. The continuation of one prompt "
        "is printed while it is generated; several are generated together and printed in order. "
        "A model with an encoder reads a source; a prompt, if given, starts its output.",
    )
    parser.set_defaults(run=run)
    add_model_options(parser)
    prompt = parser.add_argument_group("prompt, one of")
    prompts = prompt.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated"
    )
    prompts.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="file with one prompt; - is standard input"
    )
    prompts.add_argument(
        "--prompt-tokens",
        action="append",
        metavar="IDS",
        help="token ids to continue, such as '1 15 7'; prints token ids and needs no tokenizer; "
        "may be repeated",
    )
    source = parser.add_argument_group("source, for a model with an encoder, one for each prompt")
    sources = source.add_mutually_exclusive_group()
    sources.add_argument(
        "--source", action="append", metavar="TEXT", help="text for the encoder; may be repeated"
    )
    sources.add_argument(
        "--source-tokens",
        action="append",
        metavar="IDS",
        help="token ids for the encoder, with --prompt-tokens; may be repeated",
    )
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Continues the prompts and prints them."""
    sampling_params(arguments)  # refuses a wrong value before the model is loaded
    _check_together(arguments)
    if arguments.prompt_tokens:
        return _continue_tokens(arguments)
    sources = arguments.source
    if arguments.prompt_file:
        prompts = [_read(arguments.prompt_file)]
    else:
        prompts = arguments.prompt or [""] * len(sources)
    loaded = load(arguments)

    from megatron_infer.engine.generate import generate

    continued = partial(
        generate,
        loaded.stages,
        loaded.tokenizer,
        prompts,
        sampling_params(arguments, loaded.defaults),
        sources=sources,
        start_token=loaded.start_token,
        stop=loaded.stop_tokens,
        special_tokens=loaded.defaults.adds_special_tokens,
    )
    started = time.perf_counter()
    if len(prompts) == 1:
        with _StreamedLine(prompts[0]) as line:
            completions = continued(on_text=lambda _, text: line.write(text))
    else:
        completions = continued()
        for number, one in enumerate(completions, start=1):
            _print(f"--- {number} ---\n{one.prompt}{one.text}\n")
    _summarize(loaded, completions, time.perf_counter() - started)
    return 0


def _check_together(arguments: argparse.Namespace) -> None:
    """Refuses arguments without a prompt or source, or a source in another form than its prompt."""
    if arguments.source_tokens and not arguments.prompt_tokens:
        raise CommandError("--source-tokens needs --prompt-tokens, which start the output")
    if arguments.source and arguments.prompt_tokens:
        raise CommandError("--source is a text; with --prompt-tokens use --source-tokens")
    given = (arguments.prompt, arguments.prompt_file, arguments.prompt_tokens, arguments.source)
    if not any(given):
        raise CommandError(
            "one of the arguments --prompt --prompt-file --prompt-tokens is required, or --source "
            "for a model with an encoder"
        )


def _continue_tokens(arguments: argparse.Namespace) -> int:
    """Continues prompts of token ids and prints all ids; a single prompt is streamed."""
    prompts = [_ids(text) for text in arguments.prompt_tokens]
    sources = [_ids(text) for text in arguments.source_tokens or ()] or None
    loaded = load_for_tokens(arguments)

    from megatron_infer.engine.tokens import generate_tokens

    single = len(prompts) == 1
    started = time.perf_counter()
    with _StreamedLine(" ".join(map(str, prompts[0]))) if single else nullcontext() as line:
        found = generate_tokens(
            loaded.stages,
            prompts,
            sampling_params(arguments, loaded.defaults),
            sources=sources,
            stop_tokens=loaded.stop_tokens,
            on_token=None if line is None else lambda _, token: line.write(f" {token}"),
        )
    if not single:
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True), start=1):
            _print(f"--- {number} ---\n{' '.join(map(str, (*prompt, *one.tokens)))}\n")
    _summarize(loaded, found, time.perf_counter() - started)
    return 0


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            raise InferError(f"--prompt-tokens needs token ids such as '1 15 7', got {word!r}")
    return [int(word) for word in words]


def _read(path: Path) -> str:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InferError(f"{path} is not UTF-8 text: {error}") from None
    if not text:
        raise InferError(f"{path} is empty; a prompt needs at least one character")
    return text


class _StreamedLine:
    """A line of standard output: the prompt, and the continuation while it is generated.

    Nothing is printed before the first token, so an error about the prompt stands alone. An error
    after it begins a new line.
    """

    def __init__(self, prompt: str) -> None:
        self._unprinted = prompt
        self._begun = False

    def __enter__(self) -> "_StreamedLine":
        return self

    def write(self, text: str) -> None:
        """Prints the next part of the continuation."""
        self._begun = True
        _print(self._unprinted + text)
        self._unprinted = ""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.write("\n")
        elif self._begun and issubclass(error, Exception):
            _print("\n")


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
