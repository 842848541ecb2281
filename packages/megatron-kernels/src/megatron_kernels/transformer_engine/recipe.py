"""The formats in which Transformer Engine quantizes the operands of a linear layer."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_kernels.transformer_engine import library

TransformerEngineScaling = Literal[
    "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4", "nvfp4-nearest"
]
TransformerEngineOperand = Literal["input", "weight", "gradient"]


class _Needs(NamedTuple):
    """What a recipe needs.

    Attributes:
        available: Function of `transformer_engine.pytorch` that asks the device.
        rows: Number that divides the rows of an operand.
        columns: Number that divides its columns.
    """

    available: str
    rows: int
    columns: int


_NEEDS: Final = {
    "delayed": _Needs("is_fp8_available", 8, 16),
    "tensorwise": _Needs("is_fp8_available", 8, 16),
    "blockwise": _Needs("is_fp8_block_scaling_available", 8, 16),
    "mxfp8": _Needs("is_mxfp8_available", 32, 32),
    "nvfp4": _Needs("is_nvfp4_available", 16, 16),
    "nvfp4-nearest": _Needs("is_nvfp4_available", 16, 16),
}


@dataclass(frozen=True)
class TransformerEngineRecipe:
    """Formats of the operands, by Transformer Engine's quantizers.

    | scaling | quantizer | recipe of Transformer Engine |
    |---|---|---|
    | `delayed` | `Float8Quantizer`, with scales of the caller | `DelayedScaling` |
    | `tensorwise` | `Float8CurrentScalingQuantizer`, scales that are powers of two | \
`Float8CurrentScaling` |
    | `blockwise` | `Float8BlockQuantizer`, 1 x 128, and 128 x 128 for weights | \
`Float8BlockScaling` |
    | `mxfp8` | `MXFP8Quantizer` | `MXFP8BlockScaling` |
    | `nvfp4` | `NVFP4Quantizer`, 1 x 16, and 16 x 16 for weights; Hadamard transforms and \
stochastic rounding | `NVFP4BlockScaling` |
    | `nvfp4-nearest` | the same, without the last two | |

    Attributes:
        scaling: How scales are chosen.
        wide_gradients: Whether gradients are E5M2, with more exponents. Elements of FP8 are
            otherwise E4M3.
    """

    scaling: TransformerEngineScaling
    wide_gradients: bool = False

    @property
    def scales_tensors(self) -> bool:
        """Whether a tensor has one scale, so that its bytes can be gathered as they are."""
        return self.scaling in ("delayed", "tensorwise")

    @property
    def sums_exactly_forward(self) -> bool:
        """Whether products of the forward pass add in fp32, as those of the backward pass do."""
        return self.scaling == "blockwise"

    def largest(self, operand: TransformerEngineOperand) -> float:
        """Returns the largest FP8 number of an operand."""
        wide = self.wide_gradients and operand == "gradient"
        return torch.finfo(torch.float8_e5m2 if wide else torch.float8_e4m3fn).max

    def unavailable_reason(self) -> str | None:
        """Returns why the device or its drivers do not support the recipe, or None."""
        question = getattr(library.modules(), _NEEDS[self.scaling].available)
        supported, reason = question(return_reason=True)
        return None if supported else f"{self.scaling} is not supported: {reason.rstrip('.')}"

    def shape_reason(self, rows: int, columns: int) -> str | None:
        """Returns why an operand of this shape cannot be quantized, or None."""
        needs = _NEEDS[self.scaling]
        if rows % needs.rows == 0 and columns % needs.columns == 0:
            return None
        return (
            f"{self.scaling} needs rows of a multiple of {needs.rows} and columns of a multiple of "
            f"{needs.columns}, got {rows} x {columns}"
        )

    def quantizer(
        self,
        operand: TransformerEngineOperand,
        device: torch.device,
        *,
        rows: bool,
        columns: bool,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        group: Any = None,
    ) -> Any:
        """Returns a quantizer of Transformer Engine.

        Args:
            operand: What is quantized.
            device: Where it is.
            rows: Whether a product sums over its columns (`rowwise`).
            columns: Whether a product sums over its rows (`columnwise`). Kernels make them together
                with rows, except those of `mxfp8`.
            scale: `delayed`: the factor before rounding, `[1]` float32.
            amax: `delayed`: raised to the largest magnitude of what is quantized, `[1]` float32.
            group: `tensorwise`: ranks whose tensors have one scale. Defaults to this rank.
        """
        te, types = library.modules(), library.element_types()
        use: Any = {"rowwise": rows or self.scaling != "mxfp8", "columnwise": columns}
        wide = self.wide_gradients and operand == "gradient"
        elements = types.kFloat8E5M2 if wide else types.kFloat8E4M3
        if self.scaling == "delayed":
            return te.Float8Quantizer(scale, amax, elements, **use)
        if self.scaling == "tensorwise":
            use |= {"with_amax_reduction": group is not None, "amax_reduction_group": group}
            return te.Float8CurrentScalingQuantizer(
                elements, device, force_pow_2_scales=True, **use
            )
        if self.scaling == "mxfp8":
            return te.MXFP8Quantizer(elements, **use)
        if self.scaling == "blockwise":
            dims = 2 if operand == "weight" else 1
            return te.Float8BlockQuantizer(elements, block_scaling_dim=dims, **use)
        spread = self.scaling == "nvfp4"
        return te.NVFP4Quantizer(
            types.kFloat4E2M1,
            **use,
            with_rht=spread and operand != "weight",
            with_post_rht_amax=spread and operand != "weight",
            with_2d_quantization=operand == "weight",
            stochastic_rounding=spread and operand == "gradient",
        )
