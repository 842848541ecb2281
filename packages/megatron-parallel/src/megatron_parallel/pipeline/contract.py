"""What a pipeline and its user tell each other, as plain data; importing it imports no pipeline."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch


class TensorSpec(NamedTuple):
    """A tensor that goes from one stage to the next, for example `[s, b, h]` hidden states."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class BackwardPass(NamedTuple):
    """A pass that adds to the gradients of a stage's parameters.

    `last` says that no other one follows in this step. `split` says that it is the weight part of a
    split backward pass, which adds to `.grad` without calling hooks.
    """

    stage: int
    micro_batch: int
    last: bool
    split: bool = False


AroundBackward = Callable[[BackwardPass], AbstractContextManager[object]]
"""Gives a context that is entered around a backward pass."""

Inputs = Callable[[Any, int], Mapping[str, Any]]
"""`inputs(micro_batch, stage)`: keyword arguments of the stage's module."""


StageOutputSpec = Callable[[Any, int], TensorSpec | tuple[TensorSpec, ...]]
"""`stage_output_spec(micro_batch, stage)`: what a stage passes on to the next."""


def no_context(backward: BackwardPass) -> AbstractContextManager[object]:
    """Returns an `AroundBackward` that does nothing."""
    return nullcontext()
