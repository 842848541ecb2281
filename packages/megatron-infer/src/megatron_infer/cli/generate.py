"""``megatron-infer generate``: continue texts with the model of a checkpoint."""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.parser import Parser
from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams

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
    parser.set_defaults(run=run, parser=parser)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="DIR",
        help="a run's folder, of which the newest complete checkpoint is taken, or a checkpoint",
    )
    model.add_argument("--iteration", type=int, metavar="N", help="another checkpoint of the run")
    model.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes a GPU if there is one [default auto]",
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="precision to compute in [default float32]",
    )
    prompt = parser.add_argument_group("prompt, one of")
    sources = prompt.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated"
    )
    sources.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="file with one text; - is standard input"
    )
    sampling = parser.add_argument_group("sampling")
    for setting in dataclasses.fields(SamplingParams):
        default = "" if setting.default is None else f" [default {setting.default}]"
        sampling.add_argument(
            setting.metadata["flag"],
            dest=setting.name,
            type=float if setting.type is float else int,
            default=setting.default,
            metavar="X" if setting.type is float else "N",
            help=setting.metadata["help"] + default,
        )


def run(arguments: argparse.Namespace) -> int:
    """Continue the prompts and print them."""
    names = [setting.name for setting in dataclasses.fields(SamplingParams)]
    params = SamplingParams(**{name: getattr(arguments, name) for name in names})
    prompts = arguments.prompt or [_read(arguments.prompt_file)]
    loaded = _load(arguments)

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


def _load(arguments: argparse.Namespace) -> "LoadedModel":
    import torch
    from megatron_parallel import Mesh
    from tqdm import tqdm

    from megatron_infer.load import load_model

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise InferError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    # disable=None: no bar where standard error is not a terminal.
    with tqdm(desc="loading", unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return load_model(
            arguments.load,
            iteration=arguments.iteration,
            mesh=Mesh.single(device),
            dtype=getattr(torch, arguments.dtype),
            progress=progress,
        )


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
