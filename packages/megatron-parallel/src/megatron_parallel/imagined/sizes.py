"""Operations whose result has a size that depends on values."""

from collections.abc import Mapping
from typing import Any

import torch

_ATEN = torch.ops.aten


def needs_size(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the host needs values to allocate the result of an operation."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func.overloadpacket is _ATEN.index:  # integers give a result of their own shape
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if func.overloadpacket is _ATEN.repeat_interleave:
        return kwargs.get("output_size") is None
    return True
