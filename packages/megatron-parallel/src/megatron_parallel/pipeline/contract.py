"""Types for callers of a pipeline, as plain data. Importing them does not import a pipeline."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor sent from stage to stage, such as `[s, b, h]` activations."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class BackwardPass(NamedTuple):
    """A pass that adds to the gradients of a stage's parameters.

    Attributes:
        stage: Index of the stage.
        micro_batch: Index of the micro-batch.
        last: Whether it is the last such pass of this stage in the step.
        split: Whether it is the weight half of a split backward pass, which adds to `.grad` without
            calling hooks.
    """

    stage: int
    micro_batch: int
    last: bool
    split: bool = False


AroundBackward = Callable[[BackwardPass], AbstractContextManager[object]]
"""Returns a context that is entered around a backward pass."""

Inputs = Callable[[Any, int], Mapping[str, Any]]
"""`inputs(micro_batch, stage)` returns keyword arguments of the stage's module."""


StageOutputSpec = Callable[[Any, int], TensorSpec | tuple[TensorSpec, ...]]
"""`stage_output_spec(micro_batch, stage)` returns the spec of what a stage sends to the next stage.
"""


def no_context(backward: BackwardPass) -> AbstractContextManager[object]:
    """Returns an `AroundBackward` that does nothing."""
    return nullcontext()
