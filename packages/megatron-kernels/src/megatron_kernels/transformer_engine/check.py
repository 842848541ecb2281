"""Which recipes of Transformer Engine a device supports, and whether their products are right."""

from collections.abc import Iterator
from typing import Final, NamedTuple, get_args

import torch
from torch import Tensor

from megatron_kernels.transformer_engine import library
from megatron_kernels.transformer_engine.products import te_dgrad, te_forward, te_wgrad
from megatron_kernels.transformer_engine.recipe import (
    TransformerEngineOperand,
    TransformerEngineRecipe,
    TransformerEngineScaling,
)

SCALINGS: Final[tuple[TransformerEngineScaling, ...]] = get_args(TransformerEngineScaling)

_LIMITS: Final = {4: 0.3, 8: 0.08}
"""Largest error of a product by its bits: of three bits of a mantissa, and of one."""

_ROWS, _IN, _OUT = 256, 384, 128


class RecipeResult(NamedTuple):
    """What a check found.

    Attributes:
        scaling: Name of the recipe.
        unsupported_reason: Why it was not checked; None if it was.
        errors: Errors of forward product, gradient of the input, gradient of the weight, and their
            sum with a main gradient in float32: norms relative to those of the exact product.
        passed: Whether all are as small as the format allows.
    """

    scaling: str
    unsupported_reason: str | None
    errors: tuple[float, ...] = ()
    passed: bool = True


def recipe_reason(recipe: TransformerEngineRecipe, device: torch.device) -> str | None:
    """Returns why a device does not support a recipe, or None."""
    sample = torch.empty(0, device=device)
    return library.te_unsupported_reason(sample) or recipe.unavailable_reason()


def check_recipes(device: torch.device) -> Iterator[RecipeResult]:
    """Compares products of every recipe, of operands in bfloat16, with those in float64."""
    for scaling in SCALINGS:
        recipe = TransformerEngineRecipe(scaling)
        reason = recipe_reason(recipe, device)
        if reason is not None:
            yield RecipeResult(scaling, reason)
            continue
        errors = _errors(recipe, device)
        limit = _LIMITS[4 if scaling.startswith("nvfp4") else 8]
        yield RecipeResult(scaling, None, errors, all(each < limit for each in errors))


def _errors(recipe: TransformerEngineRecipe, device: torch.device) -> tuple[float, ...]:
    """Returns the errors of the products of a recipe."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    def few(x: Tensor, operand: TransformerEngineOperand) -> Tensor:
        amax = x.abs().amax().float().view(1)
        scale, seen = recipe.largest(operand) / amax, torch.zeros(1, device=device)
        make = recipe.quantizer(operand, device, rows=True, columns=True, scale=scale, amax=seen)
        quantized: Tensor = make(x)
        return quantized

    x, weight, dy = drawn(_ROWS, _IN), drawn(_OUT, _IN), drawn(_ROWS, _OUT)
    few_x, few_weight, few_dy = few(x, "input"), few(weight, "weight"), few(dy, "gradient")
    exact_x, exact_weight, exact_dy = (each.double() for each in (x, weight, dy))
    wgrad, main = exact_dy.t() @ exact_x, torch.full((_OUT, _IN), 16.0, device=device)
    found = (
        (te_forward(few_x, few_weight), exact_x @ exact_weight.t()),
        (te_dgrad(few_dy, few_weight), exact_dy @ exact_weight),
        (te_wgrad(few_dy, few_x), wgrad),
        (te_wgrad(few_dy, few_x, main, first=False), wgrad + 16),
    )
    return tuple(float((one - other).norm() / other.norm()) for one, other in found)
