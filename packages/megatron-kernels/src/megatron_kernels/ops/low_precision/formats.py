"""Formats of few bits: what an element can hold, and which elements share a scale.

    value = element * scale                         one scale for a tensor, a row or a block
    value = element * scale * tensor_scale          scales in E4M3, as in NVFP4

Elements are those of the OCP formats: E4M3 and E5M2 (Micikevicius et al. 2022, "FP8 Formats for
Deep Learning"), E2M1 (OCP Microscaling Formats 1.0, section 5.3.3), and 8-bit integers.

Importing this module does not import torch.
"""

from dataclasses import dataclass
from typing import Final, Literal

from megatron_kernels.errors import KernelError

ElementType = Literal["e4m3", "e5m2", "e2m1", "int8"]
"""How one element is stored."""

ScaleType = Literal["float32", "power_of_two", "e8m0", "e8m0_floor", "e4m3"]
"""How a scale is chosen and stored.

- `float32`: the largest magnitude of the block becomes the largest element.
- `power_of_two`: `float32`, rounded up to a power of two. The elements of two blocks with different
  scales are then rounded alike, except those that are subnormal in one of them.
- `e8m0`: `power_of_two`, stored in 8 bits, as NVIDIA's MXFP8 recipe does.
- `e8m0_floor`: `2^(floor(log2(amax)) - emax)`, stored in 8 bits: OCP Microscaling Formats 1.0,
  section 6.3. Magnitudes above the largest element are clipped.
- `e4m3`: stored in 8 bits, relative to a scale of the tensor (NVFP4).
"""

LARGEST: Final[dict[ElementType, float]] = {
    "e4m3": 448.0,
    "e5m2": 57344.0,
    "e2m1": 6.0,
    "int8": 127.0,
}
"""Largest element."""

LARGEST_EXPONENT: Final[dict[ElementType, int]] = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
"""Exponent of the largest power of two among the elements (OCP's `emax`)."""

_ELEMENT_BITS: Final[dict[ElementType, int]] = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "int8": 8}
_SCALE_BITS: Final[dict[ScaleType, int]] = {
    "float32": 32,
    "power_of_two": 32,
    "e8m0": 8,
    "e8m0_floor": 8,
    "e4m3": 8,
}


@dataclass(frozen=True)
class QuantFormat:
    """A format of a matrix in few bits.

    Attributes:
        elements: How elements are stored.
        rows: Rows that share a scale; 0 for all.
        columns: Columns that share a scale; 0 for all.
        scale: How scales are chosen and stored.

    Raises:
        KernelError: The values contradict one another.
    """

    elements: ElementType
    rows: int = 0
    columns: int = 0
    scale: ScaleType = "float32"

    def __post_init__(self) -> None:
        if self.rows < 0 or self.columns < 0:
            raise KernelError(
                f"blocks of {self.rows} x {self.columns} elements do not exist; give sizes of at "
                "least 1, or 0 for all rows or columns"
            )
        if self.scale == "e8m0_floor" and self.elements not in LARGEST_EXPONENT:
            raise KernelError(
                f"elements {self.elements!r} have no exponent for scale 'e8m0_floor'; use 'e8m0'"
            )

    @property
    def is_per_tensor(self) -> bool:
        """Whether all elements share one scale."""
        return not self.rows and not self.columns

    @property
    def is_per_row(self) -> bool:
        """Whether each row has one scale."""
        return self.rows == 1 and not self.columns

    @property
    def largest(self) -> float:
        """The largest element."""
        return LARGEST[self.elements]

    def bits(self, rows: int, columns: int) -> float:
        """Returns the bits of an element with its share of the scales of a matrix."""
        down = -(-rows // (self.rows or rows))
        across = -(-columns // (self.columns or columns))
        scales = down * across * _SCALE_BITS[self.scale] + 32 * (self.scale == "e4m3")
        return _ELEMENT_BITS[self.elements] + scales / (rows * columns)


FP8_TENSOR: Final = QuantFormat("e4m3")
"""E4M3 with one scale for the tensor."""

FP8_GRADIENT: Final = QuantFormat("e5m2")
"""E5M2 with one scale for the tensor."""

FP8_BLOCK: Final = QuantFormat("e4m3", 1, 128, "power_of_two")
"""E4M3 with a scale for 128 elements of a row."""

FP8_BLOCK_2D: Final = QuantFormat("e4m3", 128, 128, "power_of_two")
"""E4M3 with a scale for 128 x 128 elements."""

MXFP8: Final = QuantFormat("e4m3", 1, 32, "e8m0")
"""E4M3 with a scale for 32 elements of a row, in E8M0."""

NVFP4: Final = QuantFormat("e2m1", 1, 16, "e4m3")
"""E2M1 with a scale for 16 elements of a row, in E4M3, and a scale of the tensor."""

NVFP4_2D: Final = QuantFormat("e2m1", 16, 16, "e4m3")
"""E2M1 with a scale for 16 x 16 elements, in E4M3, and a scale of the tensor."""

INT8_ROW: Final = QuantFormat("int8", 1, 0)
"""8-bit integers with a scale for each row."""
