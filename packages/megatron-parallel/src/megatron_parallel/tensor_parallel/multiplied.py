"""Modules that multiply by a product, and the parameters that products add to them."""

from collections.abc import Iterable
from typing import Protocol, TypeGuard

from torch import Tensor, nn

from megatron_parallel.errors import LayoutError
from megatron_parallel.sharding import Sharding
from megatron_parallel.tensor_parallel.product import Product


class Multiplies(Protocol):
    """A module that multiplies by some of its parameters, as layers cut over an axis do.

    Attributes:
        product: What it multiplies by.
        multiplied: Names of the parameters that are handed to the product, in its order.
        sharding: Of its parameters.
    """

    product: Product
    multiplied: tuple[str, ...]
    sharding: dict[str, Sharding]


def multiplies(module: object) -> TypeGuard[Multiplies]:
    """Returns whether a module is a `Multiplies`; a table of embeddings without a product is none.

    `isinstance` cannot tell: from Python 3.12 on it does not see the parameters of a module.
    """
    return hasattr(module, "multiplied") and getattr(module, "product", None) is not None


def multiplied_by(layer: object) -> tuple[Tensor, ...]:
    """This rank's parts of what a `Multiplies` hands to its product."""
    return tuple([getattr(layer, name) for name in layer.multiplied])  # type: ignore[attr-defined]


def add_further(table: dict[str, Sharding], product: Product) -> tuple[str, ...]:
    """Adds what a product has beside the weight to a layer's table; names in the product's order.

    Raises:
        LayoutError: The layer has a parameter of that name.
    """
    further = product.shardings(table["weight"])
    for name in further.keys() & {"bias", *table}:
        raise LayoutError(f"a product's parameter {name!r} is one of the layer's: rename it")
    table.update(further)
    return ("weight", *further)


def further_names(module: nn.Module) -> set[str]:
    """Returns the names, in a module, of the parameters that products add to layers."""
    found = set[str]()
    for prefix, layer in module.named_modules():
        if multiplies(layer):
            found |= {f"{prefix}.{name}" if prefix else name for name in layer.multiplied[1:]}
    return found


def train_adapters(modules: Iterable[nn.Module], products: Iterable[Product]) -> bool:
    """Freezes what is not trained where a product of the model adapts (`Product.adapts`).

    Of all parameters only those stay trainable that such products add to layers. Call it before
    gradient buffers and optimizer are built.

    Args:
        modules: This rank's stages.
        products: Of the whole model: a stage without an adapter is frozen too.

    Returns:
        Whether there is such a product. Without one, nothing is changed.
    """
    if not any(product.adapts for product in products):
        return False
    for module in modules:
        module.requires_grad_(False)
        for layer in module.modules():
            if multiplies(layer) and layer.product.adapts:
                for parameter in multiplied_by(layer)[1:]:
                    parameter.requires_grad_(True)
    return True


def merged_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's parameters by name with products folded into the weights.

    A model of plain layers computes the same with them. Parameters that products add are left out;
    a rank merges what it holds, without communication.
    """
    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for prefix, layer in module.named_modules():
        if not multiplies(layer) or len(layer.multiplied) == 1:
            continue
        first, *further = (f"{prefix}.{name}" if prefix else name for name in layer.multiplied)
        found[first] = layer.product.merged([weight.detach() for weight in multiplied_by(layer)])
        for name in further:
            del found[name]
    return found
