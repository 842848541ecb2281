"""Matrix products whose rows have the same bits in tiles of several sizes.

A kernel may choose its order of summation by the shapes of a product. So a product is computed in
tiles, and only in tiles of sizes that were compared on this machine: before the first product of a
shape, rows with the same numbers go through a tile of each size, at every index of the tile. A size
is used if each of its rows has the bits of the first row of the largest tile. The order of a kernel
does not depend on the numbers, and the sums of the compared rows are rounding errors alone, so that
another order has other bits in nearly every column.

One new token of 16 sequences then costs a tile of 16 rows instead of the largest one.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.errors import KernelError

SIZES: Final = (4, 8, 16, 32, 64, 128)
"""Rows of tiles, if they have the same bits. The largest one defines the bits."""

ALIGNMENT: Final = 64
"""Bytes. Kernels may treat the first elements of other rows differently."""

_SPLIT: Final = 32
"""A smaller tile is not worth a call of its own; its rows are padded to the next size."""

_CONTENTS: Final = 3
"""Different rows that are compared at every index of a tile."""


@dataclass(frozen=True)
class Setting:
    """What the kernel of a product may depend on, besides shapes.

    Attributes:
        dtype: Dtype of the factors and the product.
        device: Device of the factors.
        threads: Number of threads of torch.
        precision: Name of torch's precision of products in float32.
    """

    dtype: torch.dtype
    device: torch.device
    threads: int
    precision: str

    @classmethod
    def of(cls, x: Tensor) -> "Setting":
        """Returns the setting of products of a tensor."""
        precision = torch.get_float32_matmul_precision()
        return cls(x.dtype, x.device, torch.get_num_threads(), precision)


def multiply_in_tiles(
    x: Float[Tensor, "rows k"], weight: Float[Tensor, "out k"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Returns `x W^T + b`, computed in tiles whose rows have the same bits.

    Raises:
        KernelError: Not even the rows of the largest tile have.
    """
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    x, matrix = aligned(x), aligned(weight).t()
    rows = len(x)
    offset = matrix.data_ptr() % ALIGNMENT
    sizes = weight_sizes(*matrix.shape, bias is not None, offset, Setting.of(x))
    bounds = list(tiles(rows, sizes))
    if len(bounds) == 1 and bounds[0][2] > rows:
        return _multiply(_padded(x, bounds[0][2]), matrix, bias)[:rows]
    y = x.new_empty(rows, weight.shape[0])
    for start, end, size in bounds:
        if end - start == size:
            _multiply(x[start:end], matrix, bias, y[start:end])
        else:
            y[start:end] = _multiply(_padded(x[start:end], size), matrix, bias)[: end - start]
    return y


def _padded(x: Tensor, rows: int) -> Tensor:
    return functional.pad(x, (0, 0, 0, rows - len(x)))


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, matrix, out=out)
    return torch.addmm(bias, x, matrix, out=out)


def tiles(rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yields the first row, the end and the size of tiles; a size beyond the end is padding."""
    start = 0
    while start < rows:
        left = rows - start
        fitting = max((size for size in sizes if size <= left), default=0)
        above = min((size for size in sizes if size >= left), default=0)
        split = fitting >= _SPLIT and left - fitting <= fitting // 2
        size = fitting if split or not above else above
        yield start, min(start + size, rows), size
        start += size


def aligned(x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows _"]:
    """Returns rows with zeros at their end, so that they fill multiples of `ALIGNMENT` bytes."""
    missing = -x.shape[-1] % (ALIGNMENT // x.element_size())
    return functional.pad(x, (0, missing)) if missing else x.contiguous()


@functools.cache
def weight_sizes(k: int, n: int, biased: bool, offset: int, setting: Setting) -> tuple[int, ...]:
    """Returns the sizes of tiles whose rows have the same bits in a product with a weight.

    Args:
        k: Number of columns of the rows.
        n: Number of columns of the product.
        biased: Whether a bias is added.
        offset: Bytes from a multiple of `ALIGNMENT` to the weight.
        setting: Dtype, device and others.

    Raises:
        KernelError: The rows of the largest tile have different bits.
    """
    contents, columns = order_sensitive(k, n, setting)
    shift = offset // columns.element_size()
    memory = columns.new_empty(columns.numel() + shift)
    matrix = memory[shift:].view(n, k).copy_(columns).t()
    bias = torch.mm(contents, matrix)[0].roll(1) if biased else None

    def product(x: Tensor) -> Tensor:
        return _multiply(x, matrix, bias)

    expected = product(cycled(contents, SIZES[-1]))[: len(contents)]
    sizes = tuple(size for size in SIZES if rows_agree(product, contents, expected, size))
    if SIZES[-1] not in sizes:
        raise KernelError(
            f"rows of a {setting.dtype} product [{SIZES[-1]}, {k}] x [{k}, {n}] have bits that "
            f"depend on their index on {setting.device}; no batch-invariant backend exists there, "
            "use another one"
        )
    return sizes


def rows_agree(
    product: Callable[[Float[Tensor, "rows k"]], Float[Tensor, "*batch rows n"]],
    contents: Float[Tensor, "c k"],
    expected: Float[Tensor, "c n"],
    size: int,
) -> bool:
    """Returns whether a product of `size` rows gives the expected bits at every index."""
    for shift in range(len(contents)):
        found = product(cycled(contents, size, shift))
        if not torch.equal(found, cycled(expected, size, shift).expand_as(found)):
            return False
    return True


def cycled(contents: Float[Tensor, "c k"], size: int, shift: int = 0) -> Float[Tensor, "{size} k"]:
    """Returns rows that repeat the contents, beginning with that of index `shift`."""
    indices = (torch.arange(size, device=contents.device) + shift) % len(contents)
    return contents[indices]


def order_sensitive(k: int, n: int, setting: Setting) -> tuple[Tensor, Tensor]:
    """Returns `_CONTENTS` rows `[_, k]` and columns `[n, k]` whose products are rounding errors.

    Each term of a sum has its negative at another index, so the order of summation alone decides
    what is left.
    """
    generator = torch.Generator().manual_seed(k * 1_000_003 + n)
    order = torch.randperm(k, generator=generator)
    rows = torch.randn(_CONTENTS, k // 2, generator=generator, dtype=torch.float64)
    columns = torch.randn(n, k // 2, generator=generator, dtype=torch.float32)
    odd = k % 2
    both = functional.pad(torch.cat((rows, rows), 1), (0, odd))[:, order]
    signed = functional.pad(torch.cat((columns, -columns), 1), (0, odd))[:, order]
    return both.to(setting.device, setting.dtype), signed.to(setting.device, setting.dtype)
