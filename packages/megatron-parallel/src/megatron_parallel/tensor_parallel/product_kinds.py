"""Kinds of products, registered in the entry-point group ``megatron.products``.

Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final

from megatron_parallel.errors import LayoutError
from megatron_parallel.extensions import Extensions, Section

if TYPE_CHECKING:
    from megatron_parallel.tensor_parallel.product import Product

GROUP: Final = "megatron.products"

PRODUCTS: Final = Extensions(
    GROUP,
    "product of linear layers",
    LayoutError,
    builtin={"lora": "megatron_parallel.tensor_parallel.lora_config:KIND"},
)
"""Kinds of products by name, including those of other distributions."""


@dataclass(frozen=True)
class ProductKind:
    """A kind of products: its settings, and the layers that compute it.

    Attributes:
        name: Name of the kind and of its entry point.
        summary: One line for lists and `--help`.
        products: `package.module:function` that returns a `Product` for each role of layers
            (`ColumnSpec.role`), such as `linear_qkv`; other layers are plain. It is called with the
            settings, or without arguments where there are none, and torch is imported with it.
        section: Settings of its own, if it has some.
    """

    name: str
    summary: str
    products: str
    section: Section | None = None

    def build(self, settings: Any = None) -> "Mapping[str, Product]":
        """Returns the product of each role.

        Args:
            settings: An object of `section.config`. Defaults to its defaults.

        Raises:
            LayoutError: The function cannot be imported.
        """
        try:
            build: Callable[..., Mapping[str, Product]]
            build = EntryPoint(self.name, self.products, GROUP).load()
        except (ImportError, AttributeError) as error:
            raise LayoutError(
                f"the products of {self.name!r} are built by {self.products}, which cannot be "
                f"imported: {error}; repair or uninstall the distribution that provides it"
            ) from error
        if self.section is None:
            return build()
        return build(self.section.config() if settings is None else settings)


def find_product(name: str) -> ProductKind:
    """Returns an installed kind of products.

    Raises:
        LayoutError: No kind has that name.
    """
    return PRODUCTS.load_instance(name, ProductKind)
