"""The names of what linear layers multiply by. Nothing here imports torch."""

from typing import Final

from megatron_parallel import LayoutError
from megatron_parallel.tensor_parallel.product_kinds import find_product

from megatron_train.errors import TrainError

PLAIN: Final = "plain"
"""The product of every layer where no other is chosen."""


def check_product(product: str) -> None:
    """Refuses a product that is not installed.

    Raises:
        TrainError: with those that are.
    """
    if product == PLAIN:
        return
    try:
        find_product(product)
    except LayoutError as error:
        raise TrainError(f"--linear-product {product}: {error}") from None
