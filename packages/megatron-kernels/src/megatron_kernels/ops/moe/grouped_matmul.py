"""Matrix products of groups of rows, each group with its own matrix: the experts of one layer."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op

_ALIGNED_BYTES = 16


def reference(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiplies all rows by every matrix in at least float32, and selects each row's group.

    It does `e` times the work of the other backends. The counts only affect a mask.
    """
    groups = torch.arange(len(weight), device=x.device)
    owner = groups.repeat_interleave(counts.to(x.device), output_size=len(x))
    products = upcast(x) @ upcast(weight)  # [e, m, o]
    own = (owner == groups[:, None])[..., None]
    return torch.where(own, products, 0).sum(0).to(x.dtype)


def looped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Computes one product for each group, in its own dtype.

    `unbind` instead of indexing: its backward stacks all gradients once, where each index would
    fill a zero tensor of the whole size. A group without rows takes part and gets a zero gradient.
    """
    parts = zip(torch.split(x, counts.tolist()), weight.unbind(0), strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


def fused(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Calls `F.grouped_mm`: one kernel, and the counts stay on the device."""
    ends = counts.to(x.device).cumsum(0, dtype=torch.int32)
    # Public as torch.nn.functional.grouped_mm from torch 2.10 on.
    return torch._grouped_mm(x, weight, offs=ends)


def fused_unsupported_reason(x: Tensor, weight: Tensor, counts: Tensor) -> str | None:
    """Returns why `fused` does not support these arguments, cheapest check first."""
    if not x.is_cuda:
        return f"needs a CUDA tensor, x is on {x.device.type}"
    if x.dtype != torch.bfloat16:
        return f"needs bfloat16, x is {x.dtype}"
    for size in weight.shape[1:]:
        if size * x.element_size() % _ALIGNED_BYTES:
            return f"rows of {size} numbers are not a multiple of {_ALIGNED_BYTES} bytes"
    if len(x) == 0:
        return "there are no rows"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the device has compute capability below 8.0"
    return None


@op(
    Backend(
        "grouped_mm",
        fused,
        fused_unsupported_reason,
        "torch's grouped_mm, one kernel for all groups",
    ),
    Backend("torch", looped, accept_all, "one product for each group"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def grouped_matmul(
    x: Float[Tensor, "m i"],
    weight: Float[Tensor, "e i o"],
    counts: Int[Tensor, " groups"],
    *,
    backend: str = AUTO,
) -> Float[Tensor, "m o"]:
    """Multiplies each row of `x` by the matrix of its group.

    Args:
        x: Rows `[m, i]`, sorted by group (`permute` sorts tokens by expert).
        weight: One matrix for each of the e groups, `[e, i, o]`; may be a transposed view.
        counts: Rows of each group, `[e]`, m in total; a group may have none.
        backend: "auto" or the name of one backend.

    Returns:
        `[m, o]` in the dtype of `x`.

    Raises:
        KernelError: The number of counts is not the number of matrices, or the counts do not add up
            to the number of rows (checked for counts on a CPU only, to avoid a synchronization).
    """
    if len(counts) != len(weight):
        raise KernelError(f"grouped_matmul: {len(counts)} counts for {len(weight)} matrices")
    if counts.device.type == "cpu" and int(counts.sum()) != len(x):
        raise KernelError(
            f"grouped_matmul: the counts add up to {int(counts.sum())} rows, x has {len(x)}"
        )
    return grouped_matmul.run(backend, x, weight, counts)
