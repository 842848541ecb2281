"""Merges the parameters of products, such as adapters, into the weights of a checkpoint."""

from pathlib import Path
from typing import Any

from megatron_ckpt import CheckpointStore, View, find_checkpoint
from megatron_models import config_of
from torch import Tensor

from megatron_train.config.from_checkpoint import TOKENIZER_FOLDER
from megatron_train.errors import TrainError
from megatron_train.product_record import build_recorded_products


def merge_checkpoint(load: str | Path, save: str | Path) -> Path:
    """Saves the model of a checkpoint with the parameters of its products merged into the weights.

    The model of the new checkpoint has plain linear layers and computes the same function. Weights
    are merged in float64 and saved in their original dtype. The new checkpoint has no optimizer
    state.

    Args:
        load: Folder of checkpoints, whose newest one is merged, or one checkpoint.
        save: Folder to save the new checkpoint into.

    Returns:
        The path of the new checkpoint.

    Raises:
        TrainError: The checkpoint has nothing to merge, or ``save`` has checkpoints already.
        CheckpointError: The checkpoint cannot be read.
        LayoutError: The product of the checkpoint is not installed.
    """
    checkpoint = find_checkpoint(load)
    store = CheckpointStore(Path(save))
    if (other := store.latest_checkpoint()) is not None:
        raise TrainError(
            f"--save {save} already has a checkpoint ({other.path}); give a folder without "
            "checkpoints"
        )
    if checkpoint.model is None:
        raise TrainError(f"{checkpoint.path} has no record of its model; give another checkpoint")
    products = build_recorded_products(checkpoint.values().get("run"), checkpoint.path)
    held = {
        n: checkpoint.read_tensor(n) for n, r in checkpoint.tensors.items() if r.group == "model"
    }
    found: dict[str, Tensor] = {}
    taken = set[str]()
    for name, spec in config_of(checkpoint.model).parameters().items():
        if name not in held:
            continue
        found[name] = held[name]
        product = products.get(spec.role)
        if product is None:
            continue
        stem = name.removesuffix("weight")
        further = [f"{stem}{local}" for local in product.shardings(spec.sharding)]
        weights = [held[each].double() for each in (name, *further)]
        found[name] = product.merged_weight(weights).to(found[name].dtype)
        taken |= {*further}
    kept = {name: held[name] for name in held if name not in taken and name not in found}
    state: dict[str, Any] = {name: [View.whole(tensor)] for name, tensor in (found | kept).items()}
    files: dict[str, bytes | Path] = {}
    if any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in checkpoint.manifest.files):
        files[TOKENIZER_FOLDER] = checkpoint.verified_folder(TOKENIZER_FOLDER)
    return store.save(checkpoint.iteration, state, model=checkpoint.model, files=files)
