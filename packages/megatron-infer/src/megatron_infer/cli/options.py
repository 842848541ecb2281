"""Options and functions that several commands share: the model, sampling, and loading."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer.defaults import GenerationDefaults
from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams

if TYPE_CHECKING:
    from megatron_data import Tokenizer

    from megatron_infer.load import LoadedModel

_TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteTokenizer",
)
"""Types of tokenizers that both encode and decode text, by Megatron's names."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the checkpoint and the device."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder of a run (its newest complete checkpoint), checkpoint, Hugging Face folder or "
        "GGUF file",
    )
    model.add_argument(
        "--iteration", type=int, metavar="N", help="iteration of the checkpoint of the run"
    )
    model.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer file or folder [default the tokenizer beside the weights]",
    )
    model.add_argument(
        "--tokenizer-type",
        choices=_TOKENIZER_TYPES,
        metavar="TYPE",
        help="type of the tokenizer if its files do not define it: one of "
        + ", ".join(_TOKENIZER_TYPES),
    )
    model.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a GPT2BPETokenizer")
    model.add_argument("--merge-file", metavar="FILE", help="merges.txt of a GPT2BPETokenizer")
    model.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device to compute on; auto uses a GPU if there is one",
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        default="float32",
        help="dtype to compute in",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the fields of `SamplingParams`."""
    sampling = parser.add_argument_group("sampling")
    for setting in dataclasses.fields(SamplingParams):
        default = (
            ""
            if setting.default is None
            else f" [default that of the model, else {setting.default}]"
        )
        sampling.add_argument(
            *(setting.metadata[key] for key in ("flag", "also") if key in setting.metadata),
            dest=setting.name,
            type=float if setting.type is float else int,
            metavar="X" if setting.type is float else "N",
            help=setting.metadata["help"] + default,
        )


def sampling_params(
    arguments: argparse.Namespace, defaults: GenerationDefaults | None = None
) -> SamplingParams:
    """Returns the settings of the sampling options; defaults of a model count for the others."""
    names = [setting.name for setting in dataclasses.fields(SamplingParams)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return (defaults or GenerationDefaults()).sampling_params(**given)


def tokenizer_from_options(arguments: argparse.Namespace) -> "Tokenizer | None":
    """Returns the tokenizer of the model options, or None if they name none."""
    names = ("tokenizer_model", "vocab_file", "merge_file")
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if not options and arguments.tokenizer_type != "ByteTokenizer":
        if arguments.tokenizer_type is not None:
            raise InferError(
                f"--tokenizer-type {arguments.tokenizer_type} needs --tokenizer-model; give both "
                "or neither"
            )
        return None

    from megatron_data import build_tokenizer

    return build_tokenizer(arguments.tokenizer_type, **options)


def load(arguments: argparse.Namespace) -> "LoadedModel[Tokenizer]":
    """Loads the model and the tokenizer of the model options."""
    loaded: LoadedModel[Tokenizer] = _load(arguments, tokenizer_from_options(arguments) or "stored")
    return loaded


def load_decoder_only(arguments: argparse.Namespace) -> "LoadedModel[Tokenizer]":
    """Loads a model that continues the text of its prompt.

    Raises:
        InferError: The model has an encoder and needs a source.
    """
    loaded = load(arguments)
    if loaded.model.reads_source:
        raise InferError(
            f"{loaded.checkpoint.path} holds a model of kind {loaded.model.config.kind!r}, which "
            "needs a source text; use `megatron-infer generate --source TEXT`"
        )
    return loaded


def load_for_tokens(arguments: argparse.Namespace) -> "LoadedModel[Tokenizer | None]":
    """Loads the model for prompts of token ids, with a tokenizer only if the options name one."""
    loaded: LoadedModel[Tokenizer | None] = _load(arguments, tokenizer_from_options(arguments))
    return loaded


def _load(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """Loads the model of the model options, with a progress bar on a terminal."""
    import torch
    from megatron_parallel import Mesh
    from tqdm import tqdm

    from megatron_infer.load import load_model

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise InferError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
    # disable=None shows no bar if standard error is not a terminal.
    with tqdm(desc="loading", unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        loaded = load_model(
            arguments.load,
            tokenizer=tokenizer,
            iteration=arguments.iteration,
            mesh=Mesh.single(device),
            dtype=getattr(torch, arguments.dtype),
            progress=progress,
        )
    for note in loaded.defaults.notes:
        print(f"megatron-infer: note: {note}", file=sys.stderr)
    return loaded
