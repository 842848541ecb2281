"""What several commands have in common: the options of the model and of sampling, and loading."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams

if TYPE_CHECKING:
    from megatron_infer.load import LoadedModel


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options that name a checkpoint and where to compute."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="PATH",
        help="a run's folder, of which the newest complete checkpoint is taken, or a checkpoint",
    )
    model.add_argument("--iteration", type=int, metavar="N", help="another checkpoint of the run")
    model.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes a GPU if there is one",
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="precision to compute in",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options that make up `SamplingParams`."""
    sampling = parser.add_argument_group("sampling")
    for setting in dataclasses.fields(SamplingParams):
        sampling.add_argument(
            *(setting.metadata[key] for key in ("flag", "also") if key in setting.metadata),
            dest=setting.name,
            type=float if setting.type is float else int,
            default=setting.default,
            metavar="X" if setting.type is float else "N",
            help=setting.metadata["help"],
        )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Return the settings that the sampling options give."""
    names = [setting.name for setting in dataclasses.fields(SamplingParams)]
    return SamplingParams(**{name: getattr(arguments, name) for name in names})


def load(arguments: argparse.Namespace) -> "LoadedModel":
    """Load the model that the model options name, with a progress bar on a terminal."""
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
