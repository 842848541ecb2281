"""The formats of the three products of a linear layer, by recipe.

| product | left | right | summed over |
|---|---|---|---|
| forward | input | weight | inputs |
| gradient of the input | gradient | weight, transposed | outputs |
| gradient of the weight | gradient, transposed | input, transposed | tokens |
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from megatron_kernels import (
    FP8_BLOCK,
    FP8_BLOCK_2D,
    FP8_TENSOR,
    INT8_ROW,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    QuantFormat,
)

from megatron_models.errors import ConfigError
from megatron_models.low_precision.config import LowPrecisionConfig

Operand = Literal["input", "weight", "gradient"]
OPERANDS: Final[tuple[Operand, ...]] = ("input", "weight", "gradient")
"""The operands, in the order of their rows in a history of magnitudes."""


@dataclass(frozen=True)
class ProductRecipe:
    """Formats of the operands of a linear layer's products.

    Attributes:
        input: Format of the input.
        weight: Format of the weight.
        gradient: Format of the gradient of the output.
        wgrad: Whether gradients of weights are computed in few bits too.
        stochastic: Whether gradients are rounded stochastically.
        hadamard: Whether the operands of the gradient of the weight are transformed, which spreads
            outliers over 16 tokens.
    """

    input: QuantFormat
    weight: QuantFormat
    gradient: QuantFormat
    wgrad: bool = True
    stochastic: bool = False
    hadamard: bool = False

    def of(self, operand: Operand) -> QuantFormat:
        """Returns the format of an operand."""
        form: QuantFormat = getattr(self, operand)
        return form


# A power of two, so that ranks with different parts of a tensor round alike.
_TENSOR: Final = replace(FP8_TENSOR, scale="power_of_two")

_RECIPES: Final = {
    "delayed": ProductRecipe(FP8_TENSOR, FP8_TENSOR, FP8_TENSOR),
    "tensorwise": ProductRecipe(_TENSOR, _TENSOR, _TENSOR),
    "blockwise": ProductRecipe(FP8_BLOCK, FP8_BLOCK_2D, FP8_BLOCK),
    "mxfp8": ProductRecipe(MXFP8, MXFP8, MXFP8),
    "nvfp4": ProductRecipe(NVFP4, NVFP4_2D, NVFP4, stochastic=True, hadamard=True),
    "nvfp4-nearest": ProductRecipe(NVFP4, NVFP4_2D, NVFP4),
}

INT8: Final = ProductRecipe(INT8_ROW, INT8_ROW, INT8_ROW, wgrad=False)
"""SwitchBack (Wortsman et al. 2023): 8-bit integers, but for gradients of weights."""


def recipe_of(config: LowPrecisionConfig) -> ProductRecipe:
    """Returns the recipe of a configuration.

    Raises:
        ConfigError: The configuration has none.
    """
    if not config.enabled:
        raise ConfigError("the configuration has no recipe; set fp8_format or fp4_format")
    if config.fp4_format is not None:
        return _RECIPES[config.fp4_recipe]
    found = replace(_RECIPES[config.fp8_recipe], wgrad=config.fp8_wgrad)
    if config.fp8_format == "hybrid":
        found = replace(found, gradient=replace(found.gradient, elements="e5m2"))
    return found
