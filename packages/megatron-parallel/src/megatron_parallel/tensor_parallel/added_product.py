"""Weight gradients that a matrix product adds to a matrix, which may be wider."""

import torch
from jaxtyping import Float
from torch import Tensor


def add_product(
    into: Float[Tensor, "out in"],
    dy: Float[Tensor, "rows out"],
    x: Float[Tensor, "rows in"],
    *,
    first: bool,
) -> None:
    """Adds a product with torch's `addmm`.

    `dy` and `x` have the dtype of `into`, or are bf16 and summed in fp32 on CUDA.
    """
    if into.dtype == dy.dtype:
        if first:
            torch.mm(dy.t(), x, out=into)
        else:
            into.addmm_(dy.t(), x)
    elif first:
        torch.mm(dy.t(), x, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, dy.t(), x, out_dtype=into.dtype, out=into)
