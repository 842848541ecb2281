"""Numbers of a step on their way to the device, which the host does not wait for."""

from collections.abc import Iterable

import torch
from jaxtyping import Float64
from megatron_parallel import to_device
from torch import Tensor


def pack(values: Iterable[float | Tensor], device: torch.device) -> Float64[Tensor, " values"]:
    """Returns numbers as one float64 vector on a device.

    Args:
        values: Numbers, or scalars on the host or on the device, where they stay.
        device: Device of the vector.
    """
    numbers = list(values)
    there = [isinstance(one, Tensor) and one.device.type == device.type for one in numbers]
    if numbers and all(there):
        return torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in numbers])
    host = [0.0 if on_device else float(one) for one, on_device in zip(numbers, there, strict=True)]
    vector = to_device(torch.tensor(host, dtype=torch.float64), device)
    if not any(there):
        return vector
    parts = zip(numbers, vector.unbind(), there, strict=True)
    return torch.stack([torch.as_tensor(n).to(v) if on_device else v for n, v, on_device in parts])
