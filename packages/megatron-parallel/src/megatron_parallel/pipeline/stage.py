"""One stage of a pipeline, as torch's schedules call it: its passes and its messages.

All computation and communication is implemented here. `BareStage` supplies only the stage's index
and its process group, so that differences between torch versions stay in `_compat.pipelining`. A
stage differs from torch's in these ways:

- Gradient buffers learn from the *schedule* that a backward pass adds to gradients and whether it
  is the stage's last. Hooks on parameters do not suffice: a split backward pass adds to `.grad`
  without calling them.
- A stage takes its inputs from the micro-batch. It refuses an output that does not match the spec
  of the next stage's input; Gloo would abort or deliver zeros.
- Tensors of a micro-batch are received into memory that is freed after use. torch keeps buffers for
  all micro-batches of a step. An output is freed when it is sent: its backward pass starts from the
  edge of the graph and not from the tensor.
- Gradients are never scaled; the loss is already divided by its denominator.
- `PipelineMonitor` records which rank this one waits for, and traffic is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_parallel._compat.pipelining import BareStage, StartedSends
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.contract import AroundBackward, BackwardPass, Inputs, TensorSpec
from megatron_parallel.pipeline.failure import PipelineMonitor
from megatron_parallel.pipeline.order import Action
from megatron_parallel.pipeline.split_backward import SplitBackward


@dataclass(frozen=True)
class StageSpec:
    """Index of a stage, number of stages, and specs of the stage's inputs and outputs."""

    index: int
    count: int
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]


@dataclass
class _MicroBatch:
    """The tensors of one micro-batch in this stage that a later action needs.

    Attributes:
        inputs: From the previous stage; leaves of the autograd graph.
        outputs: For a next stage on another rank, until they are sent.
        edges: Edges of the autograd graph at the outputs; None for an output without gradient.
        output_gradients: Gradients of the outputs, in the same order; None for integer tensors.
        input_gradients: Gradients of `inputs`, in the same order; None for integer tensors.
        weight_backward: The weight half of a split backward pass that has not run yet.
    """

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    edges: tuple[GradientEdge | None, ...] = ()
    output_gradients: tuple[Tensor | None, ...] = ()
    input_gradients: tuple[Tensor | None, ...] = ()
    weight_backward: "SplitBackward | _Roots | None" = None


@dataclass(frozen=True)
class _Roots:
    """The edges of the graph that a backward pass starts from, and the gradients there."""

    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)

    def backward(self) -> None:
        """Runs the backward pass."""
        if self.edges:
            torch.autograd.backward(self.edges, self.gradients)


class Stage(BareStage):
    """A model chunk and its index in the pipeline, for micro-batches of one shape."""

    def __init__(
        self,
        chunk: nn.Module,
        spec: StageSpec,
        mesh: Mesh,
        *,
        inputs: Inputs,
        around_backward: AroundBackward,
        monitor: PipelineMonitor,
        sends: StartedSends,
    ) -> None:
        axis = mesh.axis("pp")
        super().__init__(chunk, spec.index, spec.count, mesh.device, axis.process_group)
        self._axis = axis
        self._rank_of = mesh.layout.pipeline_rank_of
        self._spec = spec
        self._inputs = inputs
        self._around_backward = around_backward
        self._monitor = monitor
        self._sends = sends
        self._tensors: dict[int, _MicroBatch] = {}

    def clear_runtime_states(self) -> None:
        """Drops the tensors of all micro-batches, at the start and end of a step."""
        self._sends.drop()
        self._tensors.clear()

    # -- passes --------------------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = False,
    ) -> Any:
        """Runs the forward pass of one micro-batch, which is the keyword argument `micro_batch`."""
        self._sends.drop()
        micro_batch = (kwargs or {})["micro_batch"]
        with self._monitor.running(Action("F", self.stage_index, fwd_chunk_id)):
            tensors = self._tensors_of(fwd_chunk_id)
            for t in tensors.inputs:
                t.requires_grad_(self.has_backward and t.dtype.is_floating_point)
            own = self._inputs(micro_batch, self.stage_index)
            output = self.submod(*tensors.inputs, **own)
            if not self.is_last:
                outputs = self._check_outputs(output, fwd_chunk_id)
                if self.has_backward:
                    tensors.edges = tuple(
                        get_gradient_edge(t) if t.requires_grad else None for t in outputs
                    )
                if self._rank_of(self.stage_index + 1) != self._axis.index:
                    tensors.outputs = tuple(t.detach() for t in outputs)
            if not self.has_backward:
                tensors.inputs = ()
            return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs the backward pass of one micro-batch, or only its input half."""
        self._sends.drop()
        if not self.has_backward:
            return
        if full_backward:
            note = BackwardPass(self.stage_index, bwd_chunk_id, last_backward)
            action = Action("B", self.stage_index, bwd_chunk_id)
            with self._monitor.running(action), self._around_backward(note):
                self._backward(self._tensors_of(bwd_chunk_id), loss)
        else:
            with self._monitor.running(Action("I", self.stage_index, bwd_chunk_id)):
                self._backward_of_inputs(self._tensors_of(bwd_chunk_id), loss)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the weight half of a split backward pass."""
        self._sends.drop()
        if not self.has_backward:
            return
        note = BackwardPass(self.stage_index, bwd_chunk_id, last_backward, split=True)
        action = Action("W", self.stage_index, bwd_chunk_id)
        with self._monitor.running(action), self._around_backward(note):
            half, self._tensors_of(bwd_chunk_id).weight_backward = (
                self._tensors_of(bwd_chunk_id).weight_backward,
                None,
            )
            if isinstance(half, SplitBackward):
                half.accumulate_weight_gradients()
            elif half is not None:
                half.backward()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Raises `LayoutError` if the schedule scales gradients by the number of micro-batches."""
        if grad_scale_factor != 1:
            raise LayoutError(
                f"the schedule divides gradients by {grad_scale_factor}; the loss must be divided "
                "by its denominator only"
            )

    def _backward(self, tensors: _MicroBatch, loss: Tensor | None) -> None:
        self._take_roots(tensors, loss).backward()
        tensors.input_gradients = tuple(_sendable(t, t.grad) for t in tensors.inputs)
        tensors.inputs = ()
        if loss is not None:
            loss.detach_()  # the schedule holds it until the end of the step

    def _backward_of_inputs(self, tensors: _MicroBatch, loss: Tensor | None) -> None:
        roots = self._take_roots(tensors, loss)
        if self.is_first:  # no stage waits for its input gradient: the whole pass runs later
            tensors.weight_backward = roots
            return
        half = SplitBackward(roots.edges, roots.gradients, tensors.inputs, self.submod.parameters())
        tensors.input_gradients = tuple(
            _sendable(t, gradient)
            for t, gradient in zip(tensors.inputs, half.input_gradients, strict=True)
        )
        tensors.weight_backward, tensors.inputs = half, ()
        if loss is not None:
            loss.detach_()

    def _take_roots(self, tensors: _MicroBatch, loss: Tensor | None) -> _Roots:
        """Returns the roots of the backward pass and drops them from the micro-batch."""
        if self.is_last:
            if loss is None or not loss.requires_grad:
                return _Roots()
            return _Roots([get_gradient_edge(loss)], [torch.ones_like(loss)])
        pairs = list(zip(tensors.edges, tensors.output_gradients, strict=True))
        tensors.edges = tensors.output_gradients = ()
        found = [(edge, gradient) for edge, gradient in pairs if edge is not None]
        return _Roots([edge for edge, _ in found], [gradient for _, gradient in found])

    def _check_outputs(self, output: Any, micro_batch: int) -> tuple[Tensor, ...]:
        outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        found = [
            str(TensorSpec(tuple(o.shape), o.dtype)) if isinstance(o, Tensor) else type(o).__name__
            for o in outputs
        ]
        wanted = [str(spec) for spec in self._spec.output_specs]
        if found != wanted:
            raise LayoutError(
                f"stage {self.stage_index} of {self.num_stages} returns {', '.join(found)} for "
                f"micro-batch {micro_batch}, but stage {self.stage_index + 1} expects "
                f"{', '.join(wanted)}"
            )
        return tuple(output.contiguous() for output in outputs)

    # -- messages ------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns receives of activations."""
        if self.is_first:
            return []
        self._sends.before_receive()
        self._monitor.expect_receive("activations", fwd_chunk_id, self.stage_index - 1)
        tensors = self._tensors_of(fwd_chunk_id)
        tensors.inputs = tuple(self._empty_like_spec(each) for each in self._spec.input_specs)
        return self._messages("receive of activations", tensors.inputs, self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns sends of activations; the last stage has none."""
        if self.is_last:
            return []
        self._monitor.expect_send("activations", fwd_chunk_id, self.stage_index + 1)
        tensors = self._tensors_of(fwd_chunk_id)
        sent, tensors.outputs = tensors.outputs, ()
        return self._sends.add(self._messages("send of activations", sent, self.stage_index + 1))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns receives of the gradients of floating-point outputs."""
        if not self.has_backward or self.is_last:
            return []
        self._sends.before_receive()
        self._monitor.expect_receive("gradient", bwd_chunk_id, self.stage_index + 1)
        tensors = self._tensors_of(bwd_chunk_id)
        tensors.output_gradients = tuple(
            self._empty_like_spec(each) if each.dtype.is_floating_point else None
            for each in self._spec.output_specs
        )
        return self._messages("receive of gradient", tensors.output_gradients, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns sends of the gradients of floating-point inputs."""
        if not self.has_backward or self.is_first:
            return []
        self._monitor.expect_send("gradient", bwd_chunk_id, self.stage_index - 1)
        sent = self.get_local_bwd_output(bwd_chunk_id)
        return self._sends.add(self._messages("send of gradient", sent, self.stage_index - 1))

    def _messages(
        self, operation: str, tensors: Sequence[Tensor | None], stage: int
    ) -> list[dist.P2POp]:
        """Returns operations that exchange tensors with another stage; counts each in `Traffic`."""
        peer = self._axis.ranks[self._rank_of(stage)]
        p2p = dist.isend if operation.startswith("send") else dist.irecv
        found = []
        for t in tensors:
            if t is not None:
                self._axis.count(operation, t)
                found.append(dist.P2POp(p2p, t, peer, self._axis.process_group))
        return found

    def _empty_like_spec(self, expected: TensorSpec) -> Tensor:
        return torch.empty(expected.shape, dtype=expected.dtype, device=self.device)

    # -- two consecutive stages of one rank, at the bottom of a V --------------------------------

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Sets the inputs to the outputs of the previous stage, which is on this rank."""
        outputs = prev_stage_outputs
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        self._tensors_of(mb_index).inputs = tuple(t.detach() for t in outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the inputs and drops them; empty without backward passes."""
        tensors = self._tensors_of(mb_index)
        gradients, tensors.input_gradients = tensors.input_gradients, ()
        return gradients

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Sets the gradients of the outputs, computed by the next stage, which is on this rank."""
        self._tensors_of(mb_index).output_gradients = next_stage_bwd_outputs

    def _tensors_of(self, micro_batch: int) -> _MicroBatch:
        return self._tensors.setdefault(micro_batch, _MicroBatch())


def _sendable(received: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Returns the gradient of `received`, contiguous, as the previous stage expects it."""
    if not received.dtype.is_floating_point:
        return None
    return torch.zeros_like(received) if gradient is None else gradient.contiguous()
