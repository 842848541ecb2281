"""Element types by their safetensors names. This module does not import torch."""

from typing import TYPE_CHECKING

from megatron_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    import torch

#: safetensors name -> (name of the torch dtype, bytes per element, whether it is floating point)
DTYPES: dict[str, tuple[str, int, bool]] = {
    "F64": ("float64", 8, True),
    "F32": ("float32", 4, True),
    "F16": ("float16", 2, True),
    "BF16": ("bfloat16", 2, True),
    "F8_E4M3": ("float8_e4m3fn", 1, True),
    "F8_E5M2": ("float8_e5m2", 1, True),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1, True),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1, True),
    "F8_E8M0": ("float8_e8m0fnu", 1, True),
    "C64": ("complex64", 8, False),
    "I64": ("int64", 8, False),
    "I32": ("int32", 4, False),
    "I16": ("int16", 2, False),
    "I8": ("int8", 1, False),
    "U64": ("uint64", 8, False),
    "U32": ("uint32", 4, False),
    "U16": ("uint16", 2, False),
    "U8": ("uint8", 1, False),
    "BOOL": ("bool", 1, False),
}


def item_size(name: str) -> int:
    """Returns the bytes per element of the dtype with this safetensors name."""
    return DTYPES[name][1]


def is_floating(name: str) -> bool:
    """Returns whether the dtype with this safetensors name is a floating-point type."""
    return DTYPES[name][2]


def dtype_name(dtype: "torch.dtype") -> str:
    """Returns the safetensors name of a torch dtype.

    Raises:
        CheckpointError: The safetensors format does not have the dtype.
    """
    spelled = str(dtype).removeprefix("torch.")
    for name, (torch_name, _, _) in DTYPES.items():
        if torch_name == spelled:
            return name
    raise CheckpointError(f"dtype {spelled} cannot be stored; convert the tensor to another dtype")


def torch_dtype(name: str) -> "torch.dtype":
    """Returns the torch dtype for a safetensors name.

    Raises:
        CheckpointError: The name is unknown.
    """
    import torch

    if name not in DTYPES:
        raise CheckpointError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, DTYPES[name][0])
    return dtype
