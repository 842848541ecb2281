"""Layers that compute with a `Product`, and the parameters that products add to them."""

from collections.abc import Iterable
from typing import Protocol, TypeGuard

from torch import Tensor, nn

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Sharding
from megatron_parallel.tensor_parallel.product import LayerProduct, Product


class ProductLayer(Protocol):
    """A module whose output is a `Product` of its input and some of its parameters.

    Attributes:
        product: The product.
        product_parameters: Names of the parameters passed to the product, in the product's order.
        sharding: Sharding of each parameter, by name.
    """

    product: Product
    product_parameters: tuple[str, ...]
    sharding: dict[str, Sharding]


def is_product_layer(module: object) -> TypeGuard[ProductLayer]:
    """Returns whether a module is a `ProductLayer`.

    An embedding without a product is not one. `isinstance` cannot be used: from Python 3.12 on it
    does not find the parameters of a module.
    """
    return hasattr(module, "product_parameters") and getattr(module, "product", None) is not None


def product_weights(layer: object) -> tuple[Tensor, ...]:
    """Returns this rank's shards of the parameters that a `ProductLayer` passes to its product."""
    return tuple([getattr(layer, name) for name in layer.product_parameters])  # type: ignore[attr-defined]


def add_product_parameters(table: dict[str, Sharding], product: Product) -> tuple[str, ...]:
    """Adds the parameters of a product to the sharding table of a layer.

    Returns:
        Names of the parameters passed to the product, in its order, from `"weight"` on.

    Raises:
        LayoutError: The layer has a parameter of the same name.
    """
    added = product.shardings(table["weight"])
    for name in added.keys() & {"bias", *table}:
        raise LayoutError(
            f"the product and the layer both have a parameter {name!r}: rename the product's"
        )
    table.update(added)
    return ("weight", *added)


def bind_product(layer: nn.Module, product: Product, mesh: Mesh) -> Product:
    """Returns the product of one layer: a `LayerProduct` may add state to it."""
    return product.bind(layer, mesh) if isinstance(product, LayerProduct) else product


def added_parameter_names(module: nn.Module) -> set[str]:
    """Returns the names of the parameters in `module` that products add to layers."""
    found = set[str]()
    for prefix, layer in module.named_modules():
        if is_product_layer(layer):
            found |= {
                f"{prefix}.{name}" if prefix else name for name in layer.product_parameters[1:]
            }
    return found


def freeze_all_but_adapters(modules: Iterable[nn.Module], products: Iterable[Product]) -> bool:
    """Freezes all parameters except those of adapters, if the model has adapters.

    Adapters are products with `Product.is_adapter`. The parameters that they add to layers stay
    trainable. Call this before gradient buffers and the optimizer are built.

    Args:
        modules: Stages of this rank.
        products: Products of the whole model, so that a stage without an adapter is frozen too.

    Returns:
        Whether the model has an adapter. Without one, nothing is changed.
    """
    if not any(product.is_adapter for product in products):
        return False
    for module in modules:
        module.requires_grad_(False)
        for layer in module.modules():
            if is_product_layer(layer) and layer.product.is_adapter:
                for parameter in product_weights(layer)[1:]:
                    parameter.requires_grad_(True)
    return True


def merged_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's parameters by name, with products merged into the weights.

    A model without products computes the same from them. Parameters that products add are left
    out. Each rank merges its own shards, without communication.
    """
    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for prefix, layer in module.named_modules():
        if not is_product_layer(layer) or len(layer.product_parameters) == 1:
            continue
        first, *added = (
            f"{prefix}.{name}" if prefix else name for name in layer.product_parameters
        )
        found[first] = layer.product.merged_weight(
            [weight.detach() for weight in product_weights(layer)]
        )
        for name in added:
            del found[name]
    return found
