"""Rows of a table by index, whose gradient is summed in at least float32."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


def select_rows(
    weight: Float[Tensor, "rows h"], indices: Int[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens h"]:
    """Returns rows of a table. The gradient of a row is the sum over the indices that select it.

    On a CPU, torch's `F.embedding` and `weight[indices]` add up this sum in the dtype of the weight
    (torch 2.13), so that in bfloat16 a row that is selected more than 256 times has a wrong
    gradient. `index_select` adds in float32. Compiled code and CUDA kernels of `F.embedding` do so,
    too.

    Args:
        weight: The table `[rows, h]`.
        indices: Indices of rows, of any shape.

    Returns:
        `[..., h]` in the dtype of the weight.
    """
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        return weight.index_select(0, indices.flatten()).view(*indices.shape, weight.shape[1])
    return functional.embedding(indices, weight)
