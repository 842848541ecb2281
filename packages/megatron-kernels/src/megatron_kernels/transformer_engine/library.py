"""Transformer Engine itself: what these backends use of it, and why a call cannot use it.

The names were read in the sources of the versions 2.10 to 2.20 (`Library.minimum` and
`Library.below` in `megatron_kernels.availability`); tests compare their signatures with a table.

| name | public in its documentation |
|---|---|
| quantizers and `is_*_available` of `transformer_engine.pytorch` | yes |
| `general_gemm` of `transformer_engine.pytorch.cpp_extensions` | no |
| `gather_along_first_dim` of `transformer_engine.pytorch.distributed` | no |
| kernels of norms and `DType` of `transformer_engine_torch` | no |

Its modules `Linear` and `LayerNormLinear` compute products and communication at once, with state
of one process-wide object, so a `Product` cannot be made of them.
"""

from typing import Any, Final

import torch
from torch import Tensor

from megatron_kernels.ops.optional import missing_library

NAME: Final = "transformer_engine"
"""Name of these backends."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def te_unsupported_reason(x: Tensor, *others: Tensor) -> str | None:
    """Returns why Transformer Engine does not support these tensors, or None."""
    if (reason := device_reason(x)) is not None:
        return reason
    dtypes = {each.dtype for each in (x, *others)}
    if len(dtypes) > 1 or x.dtype not in _DTYPES:
        found = ", ".join(sorted(map(str, dtypes)))
        return f"needs one dtype of float32, float16, bfloat16; got {found}"
    return missing_library("transformer-engine")


def device_reason(x: Tensor) -> str | None:
    """Returns why Transformer Engine does not run where a tensor is, or None."""
    return None if x.is_cuda else f"needs a CUDA tensor, x is on {x.device.type}"


def kernels() -> tuple[Any, Any]:
    """Returns the module of kernels and the table of its names of dtypes."""
    import transformer_engine_torch  # type: ignore[import-not-found,unused-ignore]
    from transformer_engine.pytorch.constants import (  # type: ignore[import-not-found,unused-ignore]
        TE_DType,
    )

    return transformer_engine_torch, TE_DType


def element_types() -> Any:
    """Returns the enumeration of its data types, such as `kFloat8E4M3`."""
    return kernels()[0].DType


def modules() -> Any:
    """Returns `transformer_engine.pytorch`, with the quantizers."""
    import transformer_engine.pytorch as te  # type: ignore[import-not-found,unused-ignore]

    return te


def general_gemm(*args: Any, **kwargs: Any) -> Tensor:
    """Calls `general_gemm` and returns the product alone.

    Its first operand is the left one of a column-major product: `layout="TN"` is `B A^T`, `"NN"` is
    `B A` and `"NT"` is `B^T A`, of row-major matrices.
    """
    from transformer_engine.pytorch.cpp_extensions import (  # type: ignore[import-not-found,unused-ignore]
        general_gemm as gemm,
    )

    product: Tensor = gemm(*args, **kwargs)[0]
    return product


def te_gather(x: Any, group: Any) -> tuple[Any, Any]:
    """Starts the all-gather of a quantized tensor along dim 0, in its few bits.

    Returns:
        The gathered tensor, and a handle with `wait`, or None if it is complete.
    """
    from transformer_engine.pytorch.distributed import (  # type: ignore[import-not-found,unused-ignore]
        gather_along_first_dim,
    )

    gathered: tuple[Any, Any] = gather_along_first_dim(x, group, async_op=True)
    return gathered
