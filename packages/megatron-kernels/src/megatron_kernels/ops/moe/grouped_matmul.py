"""Matrix products of groups of rows, each group with its own matrix: the experts of one layer.

The number of rows of a group is data on the device, and a host that reads it waits for the device.
So `x` may have more rows than the groups: a number that the host knows without reading, such as
that of all choices of all tokens. The rows after the last group, the tail, belong to no group. They
need memory and cost no product (`grouped_mm` and `torch`); their results and their gradients are
zero, so that sums over all rows are right and no memory without values is read.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megatron_kernels._compat import outside_graphs
from megatron_kernels.errors import KernelError
from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op

_ALIGNED_BYTES = 16
_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)


def groups_of_rows(counts: Int[Tensor, " e"], rows: int) -> Int[Tensor, " rows"]:
    """Returns the group of each row on the device of `counts`; `e` for a row of the tail.

    Args:
        counts: Rows of each group.
        rows: Number of rows, with the tail.
    """
    indices = torch.arange(rows, device=counts.device)
    return torch.searchsorted(counts.cumsum(0), indices, right=True)


def reference(x: Tensor, weight: Tensor, counts: Tensor, has_tail: bool) -> Tensor:
    """Multiplies all rows by every matrix in at least float32, and selects each row's group.

    It does `e` times the work of the other backends. The counts only affect a mask.
    """
    owner = groups_of_rows(counts.to(x.device), len(x))
    products = upcast(x) @ upcast(weight)  # [e, m, o]
    own = (owner == torch.arange(len(weight), device=x.device)[:, None])[..., None]
    return torch.where(own, products, 0).sum(0).to(x.dtype)


@outside_graphs
def looped(x: Tensor, weight: Tensor, counts: Tensor, has_tail: bool) -> Tensor:
    """Computes one product for each group, in its own dtype. The host reads the counts.

    `unbind` instead of indexing: its backward stacks all gradients once, where each index would
    fill a zero tensor of the whole size. A group without rows takes part and gets a zero gradient.
    Compiled code would be compiled again for other counts.
    """
    sizes = counts.tolist()
    tail = len(x) - sum(sizes)
    parts = torch.split(x[: len(x) - tail] if tail else x, sizes)
    products = [rows @ matrix for rows, matrix in zip(parts, weight.unbind(0), strict=True)]
    if tail:
        products.append(x.new_zeros(tail, weight.shape[2]))
    return torch.cat(products)


def fused(x: Tensor, weight: Tensor, counts: Tensor, has_tail: bool) -> Tensor:
    """Calls `F.grouped_mm`: one kernel, and the counts stay on the device.

    It leaves memory of the tail as it was, in results and in gradients of `x`.
    """
    counts = counts.to(x.device)
    tail = None
    if has_tail:
        tail = (groups_of_rows(counts, len(x)) == len(weight))[:, None]
        x = _apply(_ClearGradient, x, tail)
    y = functional.grouped_mm(aligned(x), aligned(weight), offs=ends_of_groups(counts))
    if tail is not None:
        with torch.no_grad():  # the gradient of the product does not read the tail
            y.masked_fill_(tail, 0)
    return _apply(_ContiguousGradient, y)


def ends_of_groups(counts: Int[Tensor, " e"]) -> Int[Tensor, " e"]:
    """Returns the row behind each group in int32, as `F.grouped_mm` takes it."""
    if torch.compiler.is_compiling():
        # Inductor sums constants, as those of padded groups, in int64 whatever dtype is asked for.
        return counts.cumsum(0).to(torch.int32)
    return counts.cumsum(0, dtype=torch.int32)


def aligned(x: Tensor) -> Tensor:
    """Returns a tensor whose rows or columns are neighbours in memory at aligned distances."""
    inner, outer = sorted(x.stride()[-2:])
    return x if inner == 1 and outer * x.element_size() % _ALIGNED_BYTES == 0 else x.contiguous()


class _ClearGradient(Function):
    """Identity, whose gradient is zero for some rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Bool[Tensor, "m 1"]) -> Tensor:
        ctx.save_for_backward(rows)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].masked_fill(rows, 0), None


class _ContiguousGradient(Function):
    """Identity. `grouped_mm` refuses gradients with strides of 0, such as those of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def _apply(function: type[Function], *args: Tensor) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def fused_unsupported_reason(
    x: Tensor, weight: Tensor, counts: Tensor, has_tail: bool
) -> str | None:
    """Returns why `fused` does not support these arguments, cheapest check first."""
    if x.device.type == "cpu":
        if x.dtype not in _ON_CPU:
            return f"needs float32, bfloat16 or float16 on a CPU, x is {x.dtype}"
        if x.dtype != torch.bfloat16 and torch.compiler.is_compiling():
            return f"needs bfloat16 in compiled code, x is {x.dtype}"
    elif not x.is_cuda:
        return f"needs a CPU or CUDA tensor, x is on {x.device.type}"
    elif x.dtype != torch.bfloat16:
        return f"needs bfloat16 on a CUDA device, x is {x.dtype}"
    for size in weight.shape[1:]:
        if size * x.element_size() % _ALIGNED_BYTES:
            return f"rows of {size} numbers are not a multiple of {_ALIGNED_BYTES} bytes"
    if len(x) == 0:
        return "there are no rows"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the device has compute capability below 8.0"
    return None


@op(
    Backend(
        "grouped_mm",
        fused,
        fused_unsupported_reason,
        "torch's grouped_mm, one kernel for all groups; the host reads no counts",
    ),
    Backend("torch", looped, accept_all, "one product for each group; the host reads the counts"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def grouped_matmul(
    x: Float[Tensor, "m i"],
    weight: Float[Tensor, "e i o"],
    counts: Int[Tensor, " groups"],
    has_tail: bool = True,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "m o"]:
    """Multiplies each row of `x` by the matrix of its group.

    Args:
        x: Rows `[m, i]`, sorted by group (`permute` sorts tokens by expert).
        weight: One matrix for each of the e groups, `[e, i, o]`; may be a transposed view.
        counts: Rows of each group, `[e]`, at most m in total; a group may have none.
        has_tail: Whether there may be rows after those of the last group, which belong to none.
            False saves clearing their results and gradients. Defaults to True.
        backend: "auto" or the name of one backend.

    Returns:
        `[m, o]` in the dtype of `x`; zero for rows of no group, which have no gradient.

    Raises:
        KernelError: The number of counts is not the number of matrices, or the counts add up to
            more than the number of rows, or to less without a tail (checked for counts on a CPU
            only, to avoid a synchronization, and not in compiled code).
    """
    if len(counts) != len(weight):
        raise KernelError(f"grouped_matmul: {len(counts)} counts for {len(weight)} matrices")
    if counts.device.type == "cpu" and not torch.compiler.is_compiling():
        total = int(counts.sum())
        if total > len(x) or (total < len(x) and not has_tail):
            raise KernelError(
                f"grouped_matmul: the counts add up to {total} rows, x has {len(x)}"
                + ("" if has_tail else " and no tail")
            )
    return grouped_matmul.run(backend, x, weight, counts, has_tail)
