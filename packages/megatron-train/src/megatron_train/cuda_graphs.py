"""Compiled layers as CUDA graphs: one launch for all kernels of a layer's pass.

    backend = GraphBackend(CudaCapture(), warmup_steps=3)
    torch.compile(layer, backend=backend)
    backend.begin_step()                    # before the passes of each step

torch.compile makes every tensor that a layer reads an input of its graph: the residual stream,
masks, rotary tables, and the words from which dropout computes its masks in this iteration. All
else that the layer depends on is constant, or the layer is compiled again. So a captured pass is
complete: it reads parameters at their addresses and other inputs from buffers of its own. Before a
replay the inputs of this micro-batch are copied into these.

Each layer has graphs of its own, which hold the activations between its two passes. The results of
a replay are copied, so that autograd never accumulates into memory that the next replay overwrites.
One micro-batch is in flight at a time: a backward pass whose activations another micro-batch has
overwritten is an error. On a CUDA device this has never run; tests replay on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.nn import Parameter

from megatron_train import _compat
from megatron_train.errors import TrainError
from megatron_train.flat_graphs import (
    Compiled,
    compile_nodes,
    needs_gradient,
    outputs_of,
    with_strides,
)

Results = Sequence[Tensor | None]


class Capture(Protocol):
    """Records what a function does to a device."""

    def record(self, run: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """Runs a function once.

        Args:
            run: Reads and writes tensors at fixed addresses.

        Returns:
            The results, and a function that computes them again in the same memory.
        """


class CudaCapture:
    """CUDA graphs that share a pool of memory, and are replayed in the order of their capture."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """Captures a graph and replays it once, since a capture computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # Backward passes are captured in the thread of autograd, beside others of this process.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = run()
        graph.replay()
        return results, graph.replay


class GraphBackend:
    """A backend of torch.compile that replays graphs.

    Args:
        capture: Records the passes.
        warmup_steps: Steps before the passes are recorded. Kernels are tuned in these.
        inner: Name of the backend that compiles the passes.
    """

    def __init__(self, capture: Capture, warmup_steps: int, inner: str = "inductor") -> None:
        self.capture = capture
        self.warmup_steps, self.inner = warmup_steps, inner
        self._step = 0

    @property
    def captures(self) -> bool:
        """Whether the warm-up is over."""
        return self._step > self.warmup_steps

    def begin_step(self) -> None:
        """Counts a step."""
        self._step += 1

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the compiled graph; without gradients, as in an evaluation, it is not captured.

        Args:
            graph: The operations, with flat inputs and outputs.
            inputs: Inputs without values.
        """
        if not (torch.is_grad_enabled() and any(map(needs_gradient, inputs))):
            compiled: Callable[..., Any] = _compat.compile_graph(self.inner, graph, inputs)
            return compiled
        outputs = [node.meta["example_value"] for node in outputs_of(graph)]
        forward, backward = _compat.differentiated(graph, inputs, len(outputs))
        return _Layers(
            self,
            compile_nodes(self.inner, forward),
            compile_nodes(self.inner, backward),
            fixed=tuple(isinstance(each, Parameter) for each in inputs),
            differentiable=tuple(each.requires_grad for each in outputs),
            strides=tuple(each.stride() for each in outputs),
        )


class _Layers:
    """The compiled code that equal layers share, with the passes of each that were recorded."""

    def __init__(
        self,
        backend: GraphBackend,
        forward: Compiled,
        backward: Compiled,
        *,
        fixed: tuple[bool, ...],
        differentiable: tuple[bool, ...],
        strides: tuple[tuple[int, ...], ...],
    ) -> None:
        self.backend = backend
        self.forward, self.backward = forward, backward
        self.fixed, self.differentiable, self.strides = fixed, differentiable, strides
        self.has_run = False  # both passes, which compile and tune kernels on their first run
        self._recorded: dict[tuple[int, ...], _Recorded] = {}

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _Function.apply(*inputs, self)  # type: ignore[no-untyped-call]
        return result

    def of(self, inputs: Sequence[Tensor]) -> "_Recorded | None":
        """Returns the recorded passes of the layer with these parameters; None in the warm-up."""
        if not (self.backend.captures and self.has_run):
            return None
        weights = (each for each, fixed in zip(inputs, self.fixed, strict=True) if fixed)
        key = tuple(each.data_ptr() for each in weights)
        if key not in self._recorded:
            self._recorded[key] = _Recorded(self)
        return self._recorded[key]

    def tangents(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of the outputs that have one."""
        given = zip(grads, self.differentiable, self.strides, strict=True)
        return [with_strides(each, strides) for each, differs, strides in given if differs]


class _Recorded:
    """Both passes of one layer.

    Attributes:
        passes: Number of forward passes so far. A backward pass belongs to the last one.
    """

    def __init__(self, layers: _Layers) -> None:
        self.passes = 0
        self._layers = layers
        self._forward = self._backward = cast("_Pass | None", None)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs; keeps what the backward pass needs."""
        self.passes += 1
        layers = self._layers
        if self._forward is None:
            capture = layers.backend.capture
            self._forward = _Pass(capture, layers.forward, inputs, layers.fixed)
        else:
            self._forward.replay(inputs)
        outputs = self._forward.results[: len(layers.differentiable)]
        return [cast(Tensor, each).clone() for each in outputs]

    def backward(self, tangents: Sequence[Tensor], number: int) -> list[Tensor | None]:
        """Returns the gradients of the inputs.

        Args:
            tangents: Gradients of the outputs.
            number: The forward pass that they belong to.
        """
        if number != self.passes or self._forward is None:
            raise TrainError(
                "a CUDA graph of a layer ran a second forward pass before the backward pass of the "
                "first, and has overwritten its activations; use --cuda-graph-impl none"
            )
        saved = self._forward.results[len(self._layers.differentiable) :]
        inputs = [*cast("list[Tensor]", saved), *tangents]
        if self._backward is None:
            fixed = [*(True for _ in saved), *(False for _ in tangents)]
            capture = self._layers.backend.capture
            self._backward = _Pass(capture, self._layers.backward, inputs, fixed)
        else:
            self._backward.replay(inputs)
        return [each if each is None else each.clone() for each in self._backward.results]


class _Pass:
    """A recorded pass, with buffers for its inputs; the first run records it.

    Args:
        capture: Records it.
        run: The pass.
        inputs: Inputs of the first run.
        fixed: Whether each input has the same address in every run.

    Attributes:
        results: Results of the latest run, in memory that the next run overwrites.
    """

    def __init__(
        self, capture: Capture, run: Compiled, inputs: Sequence[Tensor], fixed: Sequence[bool]
    ) -> None:
        self._copied = [number for number, stays in enumerate(fixed) if not stays]
        arguments = [
            t.detach() if stays else _buffer(t) for t, stays in zip(inputs, fixed, strict=True)
        ]
        self._buffers = [arguments[number] for number in self._copied]
        self.results, self._replay = capture.record(lambda: run(*arguments))

    def replay(self, inputs: Sequence[Tensor]) -> None:
        """Computes the results for other inputs."""
        for buffer, number in zip(self._buffers, self._copied, strict=True):
            buffer.copy_(inputs[number])
        self._replay()


class _Function(Function):
    """One node of the autograd graph, which runs or replays the passes of a layer."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *inputs, layers = arguments
        count = len(layers.differentiable)
        ctx.layers, ctx.recorded = layers, layers.of(inputs)
        if ctx.recorded is None:
            found = layers.forward(*inputs)
            ctx.save_for_backward(*found[count:])
            outputs = found[:count]
        else:
            outputs = ctx.recorded.forward(inputs)
            ctx.number = ctx.recorded.passes
        pairs = zip(outputs, layers.differentiable, strict=True)
        ctx.mark_non_differentiable(*(each for each, differs in pairs if not differs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tangents = ctx.layers.tangents(grads)
        if ctx.recorded is None:
            found = ctx.layers.backward(*ctx.saved_tensors, *tangents)
            ctx.layers.has_run = True
            return (*found, None)
        return (*ctx.recorded.backward(tangents, ctx.number), None)


def _buffer(tensor: Tensor) -> Tensor:
    """Returns a copy with the same strides."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor.detach())
