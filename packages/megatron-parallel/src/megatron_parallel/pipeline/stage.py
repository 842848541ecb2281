"""One stage of a pipeline: torch's `PipelineStage` with a signal around every backward pass.

What of torch's stage is replaced, and why:

- `backward_one_chunk`, `backward_weight_one_chunk`: gradient buffers learn from the *schedule* that
  a backward pass adds to the gradients and whether it is the stage's last. Counting hooks on
  parameters would be wrong: a split backward pass adds to `.grad` without calling them.
- `perform_reduce_grad`: gradients are never scaled; the loss is already divided by its denominator.
- `forward_one_chunk`: takes the inputs of a stage from the micro-batch, and refuses an output that
  is not what the next stage has made room for, which on Gloo would be an abort or silent zeros.
- `get_*_ops`: only note for whom this rank waits, and count what is sent and received.
- `get_local_bwd_output`, `set_local_bwd_input`: in an evaluation, two stages of a rank that follow
  one another (at the bottom of a V) have no gradient to hand over; torch raises there.

Stages are built with static metadata, so that the first step runs no hidden forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh import Mesh
from megatron_parallel.pipeline.contract import AroundBackward, Backward, Inputs, Passed
from megatron_parallel.pipeline.failure import Watch
from megatron_parallel.pipeline.order import Action, Kind


@dataclass(frozen=True)
class StageSpec:
    """What one stage is built from: its place and the tensors at its two borders."""

    index: int
    count: int
    received: tuple[Passed, ...]
    passed: tuple[Passed, ...]


class Stage(PipelineStage):
    """A chunk of the model at its place in the pipeline, for micro-batches of one shape."""

    def __init__(
        self,
        chunk: nn.Module,
        spec: StageSpec,
        mesh: Mesh,
        *,
        inputs: Inputs,
        around_backward: AroundBackward,
        watch: Watch,
    ) -> None:
        super().__init__(
            chunk,
            spec.index,
            spec.count,
            mesh.device,
            input_args=_examples(spec.received),
            output_args=_examples(spec.passed),
            group=mesh.axis("pp").bound,
        )
        self._axis = mesh.axis("pp")
        self._spec = spec
        self._inputs = inputs
        self._around_backward = around_backward
        self._watch = watch

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = False,
    ) -> Any:
        """Forward pass of one micro-batch, which is the keyword argument `micro_batch`."""
        micro_batch = (kwargs or {})["micro_batch"]
        with self._watch.computing(Action("F", self.stage_index, fwd_chunk_id)):
            own = dict(self._inputs(micro_batch, self.stage_index))
            with _unwrapped_errors():
                output = super().forward_one_chunk(fwd_chunk_id, (), own, save_forward_output=False)
            outputs, values = self.fwd_cache[fwd_chunk_id]
            if not self.is_last:
                outputs = self._checked(outputs, fwd_chunk_id)
            elif not self.has_backward:
                outputs = ()  # the loss is all that is wanted: do not keep the logits
            self.fwd_cache[fwd_chunk_id] = (outputs, values)
            return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Backward pass of one micro-batch, or the part of it that gives the input's gradient."""
        if not self.has_backward:
            return
        note = Backward(self.stage_index, bwd_chunk_id, last_backward)
        around = self._around_backward(note) if full_backward else nullcontext()
        kind: Kind = "B" if full_backward else "I"
        with self._watch.computing(Action(kind, self.stage_index, bwd_chunk_id)), around:
            with _unwrapped_errors():
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            grads = self.bwd_cache[bwd_chunk_id]  # autograd may give strides that cannot be sent
            self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in grads)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of a split backward pass that gives the gradients of the parameters."""
        if not self.has_backward:
            return
        note = Backward(self.stage_index, bwd_chunk_id, last_backward, split=True)
        action = Action("W", self.stage_index, bwd_chunk_id)
        with self._watch.computing(action), self._around_backward(note), _unwrapped_errors():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the last backward pass; averaging over micro-batches would be wrong here."""
        if grad_scale_factor != 1:
            raise LayoutError(
                f"gradients must not be scaled, but the schedule divides by {grad_scale_factor}"
            )
        super().perform_reduce_grad(1)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradient for a stage before it on this rank; nothing without backward passes."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradient from a stage after it on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of activations."""
        if not self.is_first:
            self._watch.receives("activations", fwd_chunk_id, self.stage_index - 1)
        return self._counted("receive of activations", super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of gradients."""
        if self.has_backward and not self.is_last:
            self._watch.receives("gradient", bwd_chunk_id, self.stage_index + 1)
        return self._counted("receive of gradient", super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of activations; the last stage has none, whatever its output is."""
        if self.is_last:
            return []
        self._watch.sends("activations", fwd_chunk_id, self.stage_index + 1)
        return self._counted("send of activations", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of gradients."""
        if self.has_backward and not self.is_first:
            self._watch.sends("gradient", bwd_chunk_id, self.stage_index - 1)
        return self._counted("send of gradient", super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operation: str, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        for message in messages:
            self._axis.count(operation, message.tensor)
        return messages

    def _checked(self, outputs: Sequence[Any], micro_batch: int) -> tuple[Tensor, ...]:
        found = [
            str(Passed(tuple(o.shape), o.dtype)) if isinstance(o, Tensor) else type(o).__name__
            for o in outputs
        ]
        wanted = [str(passed) for passed in self._spec.passed]
        if found != wanted:
            raise LayoutError(
                f"stage {self.stage_index} of {self.num_stages} passes on {', '.join(found)} for "
                f"micro-batch {micro_batch}, but stage {self.stage_index + 1} expects "
                f"{', '.join(wanted)}"
            )
        return tuple(output.contiguous() for output in outputs)


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """torch wraps what a module raises into a RuntimeError of many lines; raise what it raised."""
    own = None
    try:
        yield
    except RuntimeError as error:
        own = error.__cause__
        if own is None or type(error) is not RuntimeError:
            raise
    if own is not None:
        raise own


def _examples(passed: Sequence[Passed]) -> tuple[Tensor, ...]:
    """Tensors without storage; all floating-point tensors have a gradient that travels back."""
    return tuple(
        torch.empty(p.shape, dtype=p.dtype, device="meta", requires_grad=p.dtype.is_floating_point)
        for p in passed
    )
