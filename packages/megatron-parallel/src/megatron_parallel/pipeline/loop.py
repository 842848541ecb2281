"""Runs the micro-batches of a step where there is one stage: in a loop."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from megatron_parallel.pipeline.contract import AroundBackward, Backward, Inputs
from megatron_parallel.pipeline.objective import Objective
from megatron_parallel.pipeline.order import Action


class Runner(Protocol):
    """Runs the micro-batches of a step and says what this rank computed, in order."""

    def run(self, micro_batches: Sequence[Any], backward: bool) -> list[Action]:
        """Run one step."""


class LoopRunner:
    """One stage: one micro-batch after another, without `torch.distributed`."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        inputs: Inputs,
        around_backward: AroundBackward,
    ) -> None:
        self._module = module
        self._objective = objective
        self._inputs = inputs
        self._around_backward = around_backward

    def run(self, micro_batches: Sequence[Any], backward: bool) -> list[Action]:
        """Forward and, if asked for, backward pass of each micro-batch."""
        trace = []
        for i, micro_batch in enumerate(micro_batches):
            output = self._module(**self._inputs(micro_batch, 0))
            loss = self._objective.add(output, micro_batch)
            trace.append(Action("F", 0, i))
            if backward:
                with self._around_backward(Backward(0, i, last=i == len(micro_batches) - 1)):
                    loss.backward()  # type: ignore[no-untyped-call]
                trace.append(Action("B", 0, i))
        return trace
