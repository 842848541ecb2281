"""The all-gather of an input that a norm wrote in few bits."""

from typing import Any

import torch
from megatron_kernels.transformer_engine import is_quantized, te_gather
from megatron_parallel.collectives import start_all_gather
from megatron_parallel.mesh import Axis
from megatron_parallel.tensor_parallel import Gathering
from torch import Tensor


class _QuantizedGather:
    """An all-gather that Transformer Engine has started."""

    def __init__(self, whole: Tensor, work: Any) -> None:
        self._whole, self._work = whole, work

    def wait(self) -> Tensor:
        """Waits for it and returns the whole tensor."""
        if self._work is not None:
            self._work.wait()
        return self._whole


def start_gather(x: Tensor, axis: Axis) -> Gathering:
    """Starts the all-gather of this rank's part of an input along dim 0.

    Args:
        x: The part, in few bits or not. One scale for a tensor is the same on all ranks.
        axis: Axis that cuts it.
    """
    if not is_quantized(x):
        return start_all_gather(x, axis)
    axis.count("all_gather", torch.empty(x.shape, dtype=torch.uint8, device="meta"))
    return _QuantizedGather(*te_gather(x, axis.process_group))
