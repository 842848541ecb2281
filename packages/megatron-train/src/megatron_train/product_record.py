"""The product of linear layers in the record of a run, and its comparison with a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from megatron_ckpt import Checkpoint
from megatron_parallel.tensor_parallel import Product, find_product

from megatron_train.config.products import PLAIN
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.saved_values import describe_differences

PRODUCT: Final = "linear_product"
"""Key of the product in the objective of a record; keys of its settings are ``section.name``."""


def record_product(config: RunConfig) -> dict[str, Any]:
    """Returns the record of a run's product and its settings, a part of the objective."""
    found: dict[str, Any] = {PRODUCT: config.product}
    section = None if config.product == PLAIN else find_product(config.product).section
    if section is not None:
        settings = asdict(config.extension_settings[section.name])
        found |= {f"{section.name}.{field}": value for field, value in settings.items()}
    return found


def recorded_product(run: Any) -> str:
    """Returns the name of the product in the record of a run."""
    objective = run.get("objective") if isinstance(run, Mapping) else None
    return str(objective.get(PRODUCT, PLAIN)) if isinstance(objective, Mapping) else PLAIN


def refuse_other_product(saved: str, run: Any, path: Path) -> None:
    """Refuses a checkpoint with another product.

    Args:
        saved: Name of the product of the checkpoint.
        run: Record of the run that loads the checkpoint.
        path: Path of the checkpoint.

    Raises:
        TrainError: The products differ; the message has the remedy.
    """
    current = recorded_product(run)
    if saved == current:
        return
    more = f"give --linear-product {saved}"
    if saved == PLAIN:
        more = "begin a new run with its weights, with --finetune and another --save folder"
    elif current == PLAIN:
        more += ", or merge it into the weights first, with megatron-train merge"
    raise TrainError(
        f"{path} was saved with --linear-product {saved}, but this run has {current}; {more}"
    )


def refuse_other_tensors(
    checkpoint: Checkpoint, added_shapes: Mapping[str, Sequence[int]], run: Any
) -> None:
    """Refuses a checkpoint whose settings of the same product gave it other parameters.

    Args:
        checkpoint: Checkpoint of the run that continues.
        added_shapes: Global shapes, by name, of the parameters that the product adds on all ranks.
        run: Record of the run.

    Raises:
        TrainError: The parameters differ; the message names the settings that differ.
    """
    added = {name.rpartition(".")[2] for name in added_shapes}
    held = {
        name: list(record.shape)
        for name, record in checkpoint.tensors.items()
        if record.group == "model" and name.rpartition(".")[2] in added
    }
    if held == {name: list(shape) for name, shape in added_shapes.items()}:
        return
    saved, current = (_settings(each) for each in (checkpoint.values().get("run"), run))
    if changed := describe_differences(saved, current):
        raise TrainError(
            f"{checkpoint.path} has other parameters of --linear-product {recorded_product(run)}: "
            f"{changed}; give the settings of the checkpoint"
        )


def _settings(run: Any) -> dict[str, Any]:
    """Returns the recorded settings of a run's product by flag."""
    section = (
        find_product(recorded_product(run)).section if recorded_product(run) != PLAIN else None
    )
    if section is None:
        return {}
    flags = {f"{section.name}.{field.name}": field for field in fields(section.config)}
    objective = run["objective"]
    return {
        str(field.metadata.get("flag", key)): objective[key]
        for key, field in flags.items()
        if key in objective
    }


def build_recorded_products(run: Any, path: Path) -> Mapping[str, Product]:
    """Returns the products in the record of a run by role of layers.

    Raises:
        TrainError: The run has no product, or the record is damaged.
        LayoutError: The product is not installed.
    """
    name = recorded_product(run)
    if name == PLAIN:
        raise TrainError(f"{path} has plain linear layers; there is nothing to merge")
    kind, objective = find_product(name), run["objective"]
    if kind.section is None:
        return kind.build()
    prefix, config = f"{kind.section.name}.", kind.section.config
    settings = {k.removeprefix(prefix): v for k, v in objective.items() if k.startswith(prefix)}
    try:
        return kind.build(config(**settings))
    except (TypeError, ValueError) as error:
        raise TrainError(
            f"{path} is damaged: invalid settings {settings} of {name}: {error}"
        ) from None
