"""Makes a checkpoint with experts from that of a dense model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ckpt import ModelRecord, find_checkpoint, find_family
from megatron_models import (
    ConfigError,
    expert_weight_sum,
    record_of,
    upcycled_config,
    upcycled_weights,
)

from megatron_train.config.from_checkpoint import model_of
from megatron_train.config.options import flags_of
from megatron_train.config.products import PLAIN
from megatron_train.derived_checkpoint import empty_store, read_weights, save_derived
from megatron_train.errors import TrainError
from megatron_train.product_record import recorded_product


@dataclass(frozen=True)
class Upcycled:
    """A saved checkpoint with experts.

    Attributes:
        path: Path of the checkpoint.
        exact: Whether the model computes the function of the dense one for every token.
        lost_family: Family of the dense model, if it has no models with these experts.
    """

    path: Path
    exact: bool
    lost_family: str | None


def upcycle_checkpoint(
    load: str | Path,
    save: str | Path,
    changes: Mapping[str, Any],
    *,
    granularity: int = 1,
    seed: int = 1234,
    family: str | None = None,
) -> Upcycled:
    """Saves a model with experts that computes the function of a dense model.

    The new checkpoint has the weights only, without optimizer state.

    Args:
        load: Folder of checkpoints, whose newest one is read, or one checkpoint.
        save: Folder to save the new checkpoint into.
        changes: Fields of experts and their values, with ``num_experts``.
        granularity: Number of slices that the feed-forward width is cut into.
        seed: Seed of the routers.
        family: Family of the new model. Defaults to that of the dense model, if it has such models.

    Raises:
        TrainError: The model cannot be upcycled as asked, or ``save`` has checkpoints already.
        CheckpointError: The checkpoint cannot be read, or there is no such family.
    """
    checkpoint = find_checkpoint(load)
    store = empty_store(save)
    dense = model_of(checkpoint, "--load")
    if (product := recorded_product(checkpoint.values().get("run"))) != PLAIN:
        raise TrainError(
            f"{checkpoint.path} was saved with --linear-product {product}; merge it into the "
            "weights first, with megatron-train merge"
        )
    try:
        config = upcycled_config(dense, granularity, changes)
    except ConfigError as error:
        flags = flags_of(type(dense))
        raise TrainError(f"{checkpoint.path}: {error.format_message(flags)}") from None
    held = None if checkpoint.model is None else checkpoint.model.family
    wanted = family or held
    differences = [] if wanted is None else find_family(wanted).differences(config)
    if family is not None and differences:
        raise TrainError(
            f"--model-family {family}: models of this family have {'; '.join(differences)}; leave "
            "it out or change the model"
        )
    made = upcycled_weights(read_weights(checkpoint), config, granularity, seed)
    kept = None if differences else wanted
    record = ModelRecord(family=kept, **record_of(config))
    path = save_derived(store, checkpoint, made, record)
    return Upcycled(path, expert_weight_sum(config)[1], held if differences else None)
