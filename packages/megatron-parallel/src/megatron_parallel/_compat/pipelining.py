"""torch's pipeline schedules, and what they need of a stage in each version of torch.

Imported only where there is a pipeline: importing torch's pipelining takes seconds.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

from megatron_parallel.pipeline.order import Action


class BareStage(PipelineStage):
    """A stage for which torch's schedules prepare nothing.

    From 2.11 to 2.15 torch changed how a stage prepares its buffers, checks its inputs and outputs,
    and infers shapes with a hidden forward pass. Subclasses of this class keep their own tensors
    and override every pass and every list of messages, so they use none of that. What remains of
    torch's stage is its index.

    Args:
        chunk: The module of the stage.
        index: Index of the stage.
        count: Number of stages of the pipeline.
        device: Device of the stage's tensors.
        group: Process group of the pipeline.
    """

    def __init__(
        self,
        chunk: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        # Without examples of its inputs and outputs a stage counts as dynamic. For one, torch 2.15
        # copies all buffers before the first step and refuses groups without other ranks.
        super().__init__(chunk, index, count, device, input_args=(), output_args=(), group=group)

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> Any:
        """Prepares nothing; torch calls it before the first step."""
        # torch 2.13 looks here for messages between stages that are not neighbours.
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        """Prepares nothing; torch calls it before the first step with backward passes."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Returns no operations; torch below 2.13 connects neighbours with them before a step.

        At the bottom of a V they would connect a rank with itself, which Gloo cannot. The ranks of
        a pipeline are connected already: before every step they gather a digest of it.
        """
        return []

    def _post_metadata_inference_cleanup(self) -> None:
        """Does nothing; torch drops the gradients of its hidden pass here, which did not run."""


class StartedSends:
    """The sends that the stages of a rank have passed to torch's schedule in a step.

    From 2.15 torch's schedules hold the operations of a send, and with them its tensors, until they
    wait for it: for gradients at the end of the step. The backend itself holds what it sends, and
    earlier versions of torch rely on that.

    Args:
        at_once: Whether the schedule starts a send before it requests another message, as schedules
            of several stages do. Those of one stage may start it together with a receive.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._operations: list[list[dist.P2POp]] = []

    def add(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Adds operations, which the schedule starts before its next pass; returns them."""
        self._operations.append(operations)
        return operations

    def before_receive(self) -> None:
        """Drops the tensors if all sends have started when the schedule requests a receive."""
        if self._at_once:
            self.drop()

    def drop(self) -> None:
        """Drops the tensors of all sends. Call it when a pass starts."""
        for each in self._operations:
            each.clear()
        self._operations.clear()


class OverlappedPass(NamedTuple):
    """One of two passes that overlap.

    Attributes:
        action: The pass.
        receive: Waits for its input.
        run: Runs it.
    """

    action: Action
    receive: Callable[[], None]
    run: Callable[[], None]


def build_planned_schedule(
    stages: Sequence[PipelineStage],
    micro_batches: int,
    loss: Callable[..., Tensor],
    plans: Sequence[Sequence[tuple[Action, ...]]],
    run_pair: Callable[[OverlappedPass, OverlappedPass], None] | None,
) -> Any:
    """Returns a schedule that runs our plans; torch adds the sends and receives of each rank.

    `run_pair` runs a forward and a backward pass that overlap. Plans without such pairs need none.
    """
    kinds = torchs._ComputationType
    stage_of_index = {stage.stage_index: stage for stage in stages}
    schedule: Any = torchs._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), micro_batches, loss_fn=loss, scale_grads=False
    )

    def theirs(action: Action) -> Any:
        return torchs._Action(action.stage, kinds(action.kind), action.micro_batch)

    ours = {theirs(action): action for plan in plans for turn in plan for action in turn}

    def forward(stage: Any, number: int, context: Any) -> None:
        output = stage.forward_one_chunk(
            number,
            context.arg_mbs[number],
            context.kwarg_mbs[number],
            save_forward_output=False,
        )
        schedule._maybe_compute_loss(stage, output, context.target_mbs, number)

    def backward(stage: Any, number: int, context: Any) -> None:
        schedule.backward_counter[stage.stage_index] += 1
        stage.backward_one_chunk(
            number,
            loss=schedule._maybe_get_loss(stage, number),
            full_backward=True,
            last_backward=schedule.backward_counter[stage.stage_index] == micro_batches,
        )

    def one_of_pair(action: Any, context: Any) -> OverlappedPass:
        stage, number = stage_of_index[action.stage_index], action.microbatch_index
        is_forward = action.computation_type == kinds.FORWARD
        receives = schedule.fwd_recv_ops if is_forward else schedule.bwd_recv_ops
        run = partial(forward if is_forward else backward, stage, number, context)

        def receive() -> None:
            for work in receives.pop((action.stage_index, number), ()):
                work.wait()

        return OverlappedPass(ours[action], receive, run)

    def overlapped(action: Any, context: Any) -> None:
        cast(Any, run_pair)(*(one_of_pair(each, context) for each in action.sub_actions))

    if run_pair is not None:
        schedule.register_custom_function(kinds.OVERLAP_F_B, overlapped)
    schedule.pipeline_order = {
        rank: [
            theirs(turn[0])
            if len(turn) == 1
            else torchs._Action(-1, kinds.OVERLAP_F_B, None, tuple(map(theirs, turn)))
            for turn in plan
        ]
        for rank, plan in enumerate(plans)
    }
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def run_schedule(
    schedule: Any,
    stages: Sequence[PipelineStage],
    micro_batches: Sequence[Any],
    *,
    backward: bool,
) -> None:
    """Runs one step over micro-batches as they are; torch's `step` would split a batch of tensors.

    Each micro-batch is the target of the loss, and the keyword argument `micro_batch` of stages.
    """
    schedule._has_backward = backward
    schedule._internal_losses.clear()
    for stage in stages:
        stage.has_backward = backward
        stage.clear_runtime_states()
    try:
        with _quiet(logging.getLogger("torch.distributed.pipelining.schedules")):
            schedule._step_microbatches(
                [()] * len(micro_batches),
                [{"micro_batch": micro_batch} for micro_batch in micro_batches],
                list(micro_batches),
                return_outputs=False,
            )
    finally:
        for stage in stages:
            stage.clear_runtime_states()


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Demotes errors of this logger, which dumps whole schedules, to debug; they are raised too."""

    def demote(record: logging.LogRecord) -> bool:
        if record.levelno > logging.DEBUG:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logger.isEnabledFor(record.levelno)

    logger.addFilter(demote)
    try:
        yield
    finally:
        logger.removeFilter(demote)
