"""What linear layers multiply by, and the settings that a product brings to a run.

A product is found by the entry-point group ``megatron.products``. Its settings become flags and a
section of files; a run has those of its own product, and others are refused. Importing this module
does not import torch.
"""

from collections.abc import Mapping
from typing import Final

from megatron_parallel import LayoutError, Section
from megatron_parallel.tensor_parallel.product_kinds import PRODUCTS, find_product

from megatron_train.config.values import Values
from megatron_train.errors import TrainError

PLAIN: Final = "plain"
"""The product of every layer where no other is chosen."""


def product_sections(product: str | None = None) -> dict[str, Section]:
    """Return the sections of a product by name.

    Args:
        product: its name. Defaults to all that are installed.

    Raises:
        TrainError: two products bring a section of one name.
    """
    names = list(PRODUCTS.entries()) if product is None else [product]
    found: dict[str, Section] = {}
    for name in names:
        section = None if name == PLAIN else find_product(name).section
        if section is None:
            continue
        if section.name in found:
            raise TrainError(
                f"two products bring the section {section.name!r}; uninstall one of them"
            )
        found[section.name] = section
    return found


def check_product(product: str) -> None:
    """Refuse a product that is not installed.

    Raises:
        TrainError: with those that are.
    """
    if product == PLAIN:
        return
    try:
        find_product(product)
    except LayoutError as error:
        raise TrainError(f"--linear-product {product}: {error}") from None


def refuse_other_products(values: Values, product: str, flags: Mapping[str, str]) -> None:
    """Refuse settings of products other than the run's.

    Args:
        values: what was given.
        product: of the run.
        flags: flag of every setting, by its key.

    Raises:
        TrainError: naming the product that has the setting.
    """
    for other in PRODUCTS.entries():
        for name in product_sections(other) if other != product else ():
            given = next(iter(values.section(name)), None)
            if given is not None:
                raise TrainError(
                    f"{flags[f'{name}.{given}']} is a setting of the product {other}, and the run "
                    f"has {product}; give --linear-product {other}, or leave it out"
                )
