"""Runs the micro-batches of a step through one stage, in a loop."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from megatron_parallel.pipeline.contract import AroundBackward, BackwardPass, Inputs
from megatron_parallel.pipeline.objective import Objective
from megatron_parallel.pipeline.order import Action, planned_action_groups
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver


class Runner(Protocol):
    """Runs the micro-batches of a step."""

    def run(self, micro_batches: Sequence[Any], backward: bool) -> list[Action]:
        """Runs one step; returns the passes of this rank, in order."""


class LoopRunner:
    """Runs one stage without `torch.distributed`, one micro-batch after another.

    With `interleaver`, the forward pass of a micro-batch alternates with the backward pass of the
    previous one.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        inputs: Inputs,
        around_backward: AroundBackward,
        interleaver: PassInterleaver | None = None,
    ) -> None:
        self._module = module
        self._objective = objective
        self._inputs = inputs
        self._around_backward = around_backward
        self._interleaver = interleaver

    def run(self, micro_batches: Sequence[Any], backward: bool) -> list[Action]:
        """Runs the forward pass and, if `backward`, the backward pass of each micro-batch."""
        if not backward:
            for micro_batch in micro_batches:
                self._forward(micro_batch)
            return [Action("F", 0, i) for i in range(len(micro_batches))]
        losses: dict[int, Tensor] = {}
        trace: list[Action] = []

        def forward(number: int) -> None:
            losses[number] = self._forward(micro_batches[number])

        def back(number: int) -> None:
            last = number == len(micro_batches) - 1
            with self._around_backward(BackwardPass(0, number, last)):
                losses.pop(number).backward()  # type: ignore[no-untyped-call]

        of_kind = {"F": forward, "B": back}
        schedule = "1f1b" if self._interleaver is None else "combined-1f1b"
        for turn in planned_action_groups(schedule, 1, 0, len(micro_batches)):
            passes = [partial(of_kind[action.kind], action.micro_batch) for action in turn]
            if self._interleaver is not None and len(passes) == 2:
                self._interleaver.run_pair(first=passes[1], second=passes[0])
            else:
                passes[0]()
            trace += turn
        return trace

    def _forward(self, micro_batch: Any) -> Tensor:
        output = self._module(**self._inputs(micro_batch, 0))
        return self._objective.add(output, micro_batch)
