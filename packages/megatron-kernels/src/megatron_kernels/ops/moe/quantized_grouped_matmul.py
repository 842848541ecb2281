"""Products of groups of rows in FP8, each group with its own matrix: the experts of one layer.

    y = quantized_grouped_matmul(x, s, w, t, counts)            [m, o]
    dx = quantized_grouped_matmul(dy, u, w_columns, t, counts)  [m, i]
    dw = quantized_grouped_gradient(dy, u, x, s, counts)        [e, o, i]

Rows are sorted by group as for `grouped_matmul`, and rows of no group may follow. Each operand has
one scale (`quantize_tensor`); none of the products has a gradient.

torch's kernel for FP8, `_scaled_grouped_mm`, runs on compute capability 9.0 alone. It takes E4M3
and sizes that are multiples of 16, has a scale for each row, here the same for all, and returns
bfloat16. In the gradient it sums over the rows of a group, whose first one must be a multiple of 16
too, so rows are copied there to groups with room. Elsewhere the elements, which bfloat16 can hold,
are multiplied as numbers of 16 bits: no faster than `grouped_matmul`, but with the numbers of FP8.
"""

from typing import Final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from megatron_kernels._compat import is_fake, missing_gpu_reason, outside_graphs
from megatron_kernels.errors import KernelError
from megatron_kernels.ops.moe.grouped_matmul import aligned, ends_of_groups, groups_of_rows
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op

_HOPPER: Final = (9, 0)
_ROOM: Final = 16
"""Rows of a group are a multiple of this where a kernel sums over them."""


def _numbers(elements: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers in at least float32: in float64 for it."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return elements.to(exact) * scale.to(exact)


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Multiplies all rows by every matrix in at least float32, and selects each row's group."""
    rows = _numbers(x, x_scale, dtype)
    matrices = _numbers(weight, weight_scale, dtype)
    owner = groups_of_rows(counts.to(rows.device), len(rows))
    own = owner == torch.arange(len(matrices), device=rows.device)[:, None]
    return torch.where(own[..., None], rows @ matrices.mT, 0).sum(0).to(dtype)


@outside_graphs
def looped(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Computes one product for each group in at least float32. The host reads the counts."""
    sizes = counts.tolist()
    rows = _numbers(x, x_scale, dtype)
    matrices = _numbers(weight, weight_scale, dtype)
    tail = len(rows) - sum(sizes)
    parts = torch.split(rows, [*sizes, tail])[:-1]
    products = [part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)]
    return torch.cat([*products, rows.new_zeros(tail, matrices.shape[1])]).to(dtype)


def in_16_bits(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Calls `F.grouped_mm` of the elements as bfloat16, then multiplies by the scales."""
    rows, matrices = x.to(dtype), weight.to(dtype)
    y = functional.grouped_mm(aligned(rows), aligned(matrices.mT), offs=ends_of_groups(counts))
    return _scaled(y, x_scale, weight_scale).masked_fill_(
        _tail(counts, len(rows), len(matrices)), 0
    )


def fused(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Calls `torch._scaled_grouped_mm`; the counts stay on the device."""
    m, (groups, outputs, _) = len(x), weight.shape
    y: Tensor = torch._scaled_grouped_mm(
        x.contiguous(),
        weight.contiguous().mT,
        x_scale.float().expand(m).contiguous(),
        weight_scale.float().expand(groups, outputs).contiguous(),
        offs=ends_of_groups(counts),
        out_dtype=dtype,
    )
    return y.masked_fill_(_tail(counts, m, groups), 0)


def reference_gradient(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Multiplies the rows of each group, with the other rows set to zero."""
    left, right = _numbers(dy, dy_scale, dtype), _numbers(x, x_scale, dtype)
    owner = groups_of_rows(counts.to(left.device), len(left))
    own = owner == torch.arange(len(counts), device=left.device)[:, None]
    return (torch.where(own[..., None], left, 0).mT @ right).to(dtype)


@outside_graphs
def looped_gradient(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Computes one product for each group in at least float32. The host reads the counts."""
    sizes = counts.tolist()
    rest = len(x) - sum(sizes)
    lefts, rights = (
        torch.split(_numbers(*each, dtype), [*sizes, rest])[:-1]
        for each in ((dy, dy_scale), (x, x_scale))
    )
    products = [left.t() @ right for left, right in zip(lefts, rights, strict=True)]
    return torch.stack(products).to(dtype)


def gradient_in_16_bits(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Calls `F.grouped_mm` of the elements as bfloat16, then multiplies by the scales."""
    left, right = aligned(dy.to(dtype)), aligned(x.to(dtype))
    return _scaled(
        functional.grouped_mm(left.t(), right, offs=ends_of_groups(counts)), dy_scale, x_scale
    )


def fused_gradient(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Calls `torch._scaled_grouped_mm` with room in each group; counts stay on the device."""
    source, ends = rows_with_room(counts, len(x))
    left, right = (_columns(each, source) for each in (dy, x))
    groups = len(counts)
    y: Tensor = torch._scaled_grouped_mm(
        left,
        right.t(),
        dy_scale.float().expand(groups * len(left)).contiguous(),
        x_scale.float().expand(groups * len(right)).contiguous(),
        offs=ends,
        out_dtype=dtype,
    )
    return y


def rows_with_room(
    counts: Int[Tensor, " e"], rows: int
) -> tuple[Int[Tensor, " places"], Int[Tensor, " e"]]:
    """Returns places for the rows of groups that each begin at a multiple of 16.

    A group without rows has 16 places too, so that a kernel writes its product, which is zero.

    Args:
        counts: Rows of each group.
        rows: Number of rows, with those of no group.

    Returns:
        The row in each place, or ``rows`` in an empty one, and where each group ends, in int32.
        The number of places does not depend on the counts.
    """
    room = (counts + _ROOM - 1).div(_ROOM, rounding_mode="floor").clamp(min=1) * _ROOM
    ends = room.cumsum(0)
    places = torch.arange(-(-rows // _ROOM) * _ROOM + _ROOM * len(counts), device=counts.device)
    group = torch.searchsorted(ends, places, right=True)
    known = group.clamp(max=len(counts) - 1)
    within = places - (ends - room)[known]
    source = (counts.cumsum(0) - counts)[known] + within
    is_empty = (group == len(counts)) | (within >= counts[known])
    return source.masked_fill(is_empty, rows), ends.to(torch.int32)


def _columns(elements: Tensor, source: Tensor) -> Tensor:
    """Returns the rows in places as columns; zeros in empty ones."""
    codes = functional.pad(elements.view(torch.uint8), (0, 0, 0, 1))
    return codes.index_select(0, source).t().contiguous().view(elements.dtype)


def _tail(counts: Tensor, rows: int, groups: int) -> Tensor:
    """Returns whether each row belongs to no group, `[rows, 1]`."""
    return (groups_of_rows(counts, rows) == groups)[:, None]


def _scaled(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Multiplies the product of elements by both scales, in float32 and in place."""
    return y.mul_((first * second).view((1,) * y.dim()))  # a scalar would be rounded first


def _unsupported_reason(
    x: Tensor,
    other: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> str | None:
    """Returns why kernels of 16 or 8 bits do not support these arguments."""
    if dtype != torch.bfloat16:
        return f"it returns bfloat16, not {dtype}"
    if len(x) == 0:
        return "there are no rows"
    if counts.device != x.device:
        return f"the counts are on {counts.device}"
    for size in (x.shape[-1], *other.shape[1:]):
        if size % _ROOM:
            return f"sizes must be multiples of {_ROOM}, not {size}"
    return None


def in_16_bits_unsupported_reason(
    x: Tensor,
    x_scale: Tensor,
    other: Tensor,
    other_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> str | None:
    """Returns why `F.grouped_mm` does not support these arguments."""
    device = x.device
    if device.type not in ("cpu", "cuda"):
        return f"it runs on cpu and cuda, not on {device.type}"
    is_gpu = device.type == "cuda" and not is_fake(x)
    if is_gpu and torch.cuda.get_device_capability(device) < (8, 0):
        return "the device has compute capability below 8.0"
    return _unsupported_reason(x, other, counts, dtype)


def fused_unsupported_reason(
    x: Tensor,
    x_scale: Tensor,
    other: Tensor,
    other_scale: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> str | None:
    """Returns why `torch._scaled_grouped_mm` does not support these arguments."""
    device = x.device
    if device.type != "cuda":
        return f"it runs on cuda, not on {device.type}"
    for each in (x, other):
        if each.dtype != torch.float8_e4m3fn:
            return f"it multiplies e4m3 alone, not {each.dtype}"
    if (reason := missing_gpu_reason(x)) is not None:
        return reason
    if not is_fake(x) and torch.cuda.get_device_capability(device) != _HOPPER:
        return "it runs on compute capability 9.0 alone"
    return _unsupported_reason(x, other, counts, dtype)


_LOOP = "one product for each group, in float32 or float64; the host reads the counts"
_IN_16_BITS = "torch's grouped_mm of the elements as bfloat16; the host reads no counts"
_FUSED = "torch._scaled_grouped_mm, in FP8; the host reads no counts"


@op(
    Backend("scaled_grouped_mm", fused, fused_unsupported_reason, _FUSED, NEVER_RUN),
    Backend("grouped_mm", in_16_bits, in_16_bits_unsupported_reason, _IN_16_BITS),
    Backend("torch", looped, accept_all, _LOOP),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def quantized_grouped_matmul(
    x: Shaped[Tensor, "m i"],
    x_scale: Float[Tensor, ""],
    weight: Shaped[Tensor, "e o i"],
    weight_scale: Float[Tensor, ""],
    counts: Int[Tensor, " groups"],
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "m o"]:
    """Multiplies each row of `x` by the transposed matrix of its group. Has no gradient.

    Args:
        x: Rows of elements in FP8 `[m, i]`, sorted by group.
        x_scale: The factor of all elements of `x`.
        weight: Elements of one matrix for each of the e groups, `[e, o, i]`.
        weight_scale: The factor of all elements of `weight`.
        counts: Rows of each group, `[e]`, at most m in total; a group may have none.
        dtype: Dtype of the result.
        backend: "auto" or the name of one backend.

    Returns:
        `[m, o]`; zero for rows of no group.

    Raises:
        KernelError: The number of counts is not the number of matrices.
    """
    if len(counts) != len(weight):
        raise KernelError(
            f"quantized_grouped_matmul: {len(counts)} counts for {len(weight)} matrices"
        )
    return quantized_grouped_matmul.run(backend, x, x_scale, weight, weight_scale, counts, dtype)


@op(
    Backend("scaled_grouped_mm", fused_gradient, fused_unsupported_reason, _FUSED, NEVER_RUN),
    Backend("grouped_mm", gradient_in_16_bits, in_16_bits_unsupported_reason, _IN_16_BITS),
    Backend("torch", looped_gradient, accept_all, _LOOP),
    Backend("reference", reference_gradient, accept_all, "plain torch, in float32 or float64"),
)
def quantized_grouped_gradient(
    dy: Shaped[Tensor, "m o"],
    dy_scale: Float[Tensor, ""],
    x: Shaped[Tensor, "m i"],
    x_scale: Float[Tensor, ""],
    counts: Int[Tensor, " groups"],
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = AUTO,
) -> Shaped[Tensor, "groups o i"]:
    """Returns `dy^T x` over the rows of each group: gradients of matrices. Has no gradient.

    Args:
        dy: Rows of elements in FP8 `[m, o]`, sorted by group.
        dy_scale: The factor of all elements of `dy`.
        x: Rows of elements in FP8 `[m, i]`, sorted by group.
        x_scale: The factor of all elements of `x`.
        counts: Rows of each group, `[e]`, at most m in total; a group may have none.
        dtype: Dtype of the result.
        backend: "auto" or the name of one backend.

    Returns:
        `[e, o, i]`; zero for a group without rows.
    """
    return quantized_grouped_gradient.run(backend, dy, dy_scale, x, x_scale, counts, dtype)
