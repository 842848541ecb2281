"""Names of the products of linear layers. Importing this module does not import torch."""

from typing import Final

from megatron_parallel import LayoutError
from megatron_parallel.tensor_parallel.product_kinds import find_product

from megatron_train.errors import TrainError

PLAIN: Final = "plain"
"""The default product of all linear layers."""


def check_product(product: str) -> None:
    """Refuses a product that is not installed.

    Raises:
        TrainError: The message names the installed products.
    """
    if product == PLAIN:
        return
    try:
        find_product(product)
    except LayoutError as error:
        raise TrainError(f"--linear-product {product}: {error}") from None
