"""A model and its tokenizer from a checkpoint alone.

A checkpoint of megatron-train holds what is needed: the model's configuration in its manifest, the
weights, and the tokenizer's files in the folder ``tokenizer``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron_ckpt import Checkpoint, find_checkpoint
from megatron_data import Tokenizer, load_tokenizer
from megatron_models import GPT, GPTConfig, parameter_shapes
from megatron_parallel import Mesh, View, collect_shardings, parameter_views

from megatron_infer.errors import InferError

TOKENIZER_FOLDER = "tokenizer"


class LoadedModel(NamedTuple):
    """What a checkpoint holds for generation; of a model cut over ranks, this rank's part."""

    model: GPT
    tokenizer: Tokenizer
    checkpoint: Checkpoint


def load_model(
    path: str | Path,
    *,
    iteration: int | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> LoadedModel:
    """Build the model of a checkpoint, fill it, and open its tokenizer.

    All that is read is checked against the digests in the manifest: weights, tokenizer and chat
    template.

    On a mesh of several ranks all of them call this together, and each gets its part: the
    checkpoint may have been saved by any layout. Only the bytes of that part are read.

    Args:
        path: a checkpoint, or a run's folder, of which the newest complete checkpoint is taken.
        iteration: another checkpoint of the run.
        mesh: where the model goes and how it is cut; a single process on the CPU by default.
        dtype: of the model's parameters, whatever the checkpoint's floating-point type.
        progress: called with the bytes of weights this rank has read so far, and all it will.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        InferError: the checkpoint does not say which model it holds, or has no tokenizer, or that
            of another model; or the mesh has several stages on each rank.
        LayoutError: the model cannot be cut that way, or ranks found different checkpoints.
    """
    checkpoint = find_checkpoint(path, iteration)
    mesh = mesh or Mesh.single()
    if mesh.layout.vpp > 1:
        raise InferError(
            f"a mesh with vpp={mesh.layout.vpp} has several stages on each rank; load the "
            "checkpoint into a mesh with vpp=1, as every checkpoint can be"
        )
    found = f"iteration {checkpoint.iteration} with digest {checkpoint.digest}"
    mesh.agree("the checkpoint to load", {"checkpoint": found})
    if checkpoint.model is None:
        raise InferError(
            f"{checkpoint.path} does not say which model it holds; save it with a model record"
        )
    config = GPTConfig.from_dict(checkpoint.model.config)
    tokenizer = _open_tokenizer(checkpoint, config)
    shapes = parameter_shapes(config)
    checkpoint.expect(shapes, groups=["model"])  # before memory is taken for what it says
    model = _empty_model(config, mesh, dtype)
    views = parameter_views(model, collect_shardings(model), mesh)
    total, done = _stored_bytes(checkpoint, views), 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        progress(done, total)

    checkpoint.load(
        views,
        elsewhere=shapes,
        groups=["model"],
        cast="floating",
        progress=count,
    )
    return LoadedModel(model.eval(), tokenizer, checkpoint)


def _empty_model(config: GPTConfig, mesh: Mesh, dtype: torch.dtype) -> GPT:
    """Build a model of zeros; drawing initial weights would take longer than reading them."""
    model = GPT(config, mesh, dtype=dtype, device="meta")
    model.to_empty(device=mesh.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if model.rotary is not None:
        model.rotary.reset()
    return model


def _stored_bytes(checkpoint: Checkpoint, views: Mapping[str, Sequence[View]]) -> int:
    """Return how much of the checkpoint the views take, in the checkpoint's dtypes."""
    return sum(
        view.tensor.numel() * checkpoint.tensors[name].item_size
        for name, held in views.items()
        for view in held
        if name in checkpoint.tensors  # `Checkpoint.load` says so if one is not
    )


def _open_tokenizer(checkpoint: Checkpoint, config: GPTConfig) -> Tokenizer:
    if not any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in checkpoint.manifest.files):
        raise InferError(
            f"{checkpoint.path} holds no tokenizer; train with --tokenizer-model, which keeps it "
            "in every checkpoint"
        )
    folder = checkpoint.verified_folder(TOKENIZER_FOLDER)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise InferError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model "
            f"{config.vocab_size}: they do not belong together"
        )
    return tokenizer
