"""What the linear layers of a run multiply by, as the record in its checkpoints says."""

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
"""The name of the product in the objective of a record; its settings are ``section.name``."""


def record_product(config: RunConfig) -> dict[str, Any]:
    """Returns what the objective of a run's record has of its product."""
    found: dict[str, Any] = {PRODUCT: config.product}
    section = None if config.product == PLAIN else find_product(config.product).section
    if section is not None:
        settings = asdict(config.extension_settings[section.name])
        found |= {f"{section.name}.{field}": value for field, value in settings.items()}
    return found


def recorded_product(run: Any) -> str:
    """Returns the name of the product of a record's run."""
    objective = run.get("objective") if isinstance(run, Mapping) else None
    return str(objective.get(PRODUCT, PLAIN)) if isinstance(objective, Mapping) else PLAIN


def refuse_other_product(saved: str, run: Any, path: Path) -> None:
    """Refuses a checkpoint whose layers have parameters of another product.

    Args:
        saved: the product of the checkpoint.
        run: the record of the run that takes it.
        path: of the checkpoint.

    Raises:
        TrainError: with what to do.
    """
    current = recorded_product(run)
    if saved == current:
        return
    more = f"give --linear-product {saved}"
    if saved == PLAIN:
        more = "begin a new run with its weights, by --finetune and another --save folder"
    elif current == PLAIN:
        more += ", or fold it into the weights first, by megatron-train merge"
    raise TrainError(
        f"{path} comes from --linear-product {saved}, and this run has {current}; {more}"
    )


def refuse_other_tensors(
    checkpoint: Checkpoint, added_shapes: Mapping[str, Sequence[int]], run: Any
) -> None:
    """Refuses a checkpoint of the same product whose settings gave it other tensors.

    Args:
        checkpoint: of the run that continues.
        added_shapes: global shapes of the parameters that the product adds, by name, on all ranks.
        run: the record of the run.

    Raises:
        TrainError: naming the settings that differ.
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
            f"{changed}; give its settings"
        )


def _settings(run: Any) -> dict[str, Any]:
    """Returns what the record of a run has of its product's settings, by flag."""
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
    """Returns the products of a record's run, by role of the layers.

    Raises:
        TrainError: they are plain, or the record is damaged.
        LayoutError: the product is not installed.
    """
    name = recorded_product(run)
    if name == PLAIN:
        raise TrainError(f"{path} has plain linear layers: there is nothing to merge")
    kind, objective = find_product(name), run["objective"]
    if kind.section is None:
        return kind.build()
    prefix, config = f"{kind.section.name}.", kind.section.config
    settings = {k.removeprefix(prefix): v for k, v in objective.items() if k.startswith(prefix)}
    try:
        return kind.build(config(**settings))
    except (TypeError, ValueError) as error:
        raise TrainError(f"{path} is damaged: its {name} has {settings}: {error}") from None
