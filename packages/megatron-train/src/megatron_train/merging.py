"""Merges the parameters of products, such as adapters, into the weights of a checkpoint."""

from pathlib import Path

from megatron_ckpt import find_checkpoint
from megatron_models import config_of
from torch import Tensor

from megatron_train.derived_checkpoint import empty_store, read_weights, save_derived
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
    store = empty_store(save)
    if checkpoint.model is None:
        raise TrainError(f"{checkpoint.path} has no record of its model; give another checkpoint")
    products = build_recorded_products(checkpoint.values().get("run"), checkpoint.path)
    weights_by_name = read_weights(checkpoint)
    merged_weights: dict[str, Tensor] = {}
    merged = set[str]()
    for name, spec in config_of(checkpoint.model).parameters().items():
        if name not in weights_by_name:
            continue
        merged_weights[name] = weights_by_name[name]
        product = products.get(spec.role)
        if product is None:
            continue
        stem = name.removesuffix("weight")
        added_names = [f"{stem}{local}" for local in product.shardings(spec.sharding)]
        weights = [weights_by_name[each].double() for each in (name, *added_names)]
        merged_weights[name] = product.merged_weight(weights).to(merged_weights[name].dtype)
        merged |= {*added_names}
    unchanged = {
        name: weight
        for name, weight in weights_by_name.items()
        if name not in merged and name not in merged_weights
    }
    return save_derived(store, checkpoint, merged_weights | unchanged, checkpoint.model)
