"""Compiled functions whose backward pass has two halves, for schedules that split it.

    torch.compile(layer, backend=SplitBackend())

A function that torch.compile differentiates is one node of the autograd graph, which computes all
gradients at once: a zero-bubble schedule could not postpone those of weights. This backend gets the
graph that torch.compile captured, differentiates it, and cuts its backward pass in two. The first
half computes the gradients of inputs, and what both halves need. The second half computes the
gradients of parameters. `megatron_parallel.pipeline.SplitBackward` runs the halves of such a
function like those of an eager product of matrices; a backward pass that is not split runs both.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron_parallel.pipeline import gradient_wanted
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


class SplitBackend:
    """A backend of torch.compile.

    Args:
        inner: Name of the backend that compiles each of the graphs.

    Raises:
        TrainError: A graph changes its inputs or returns views of them.
    """

    def __init__(self, inner: str = "inductor") -> None:
        self.inner = inner

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the compiled graph.

        Args:
            graph: The operations, with flat inputs and outputs.
            inputs: Inputs without values.
        """
        if not (torch.is_grad_enabled() and any(map(needs_gradient, inputs))):
            compiled: Callable[..., Any] = _compat.compile_graph(self.inner, graph, inputs)
            return compiled
        outputs = [node.meta["example_value"] for node in outputs_of(graph)]
        try:
            forward, backward = _compat.differentiated(graph, inputs, len(outputs))
        except RuntimeError as error:
            raise TrainError(
                "--compile cannot split the backward pass of a layer that changes its inputs or "
                f"returns views of them ({error}); choose another --pipeline-schedule, or leave "
                "out --compile"
            ) from error
        is_weight = [isinstance(each, Parameter) for each in inputs]
        halves = split_graph(backward, is_weight)
        return _Compiled(
            forward=compile_nodes(self.inner, forward),
            first=compile_nodes(self.inner, halves.first),
            second=compile_nodes(self.inner, halves.second),
            halves=halves,
            differentiable=tuple(each.requires_grad for each in outputs),
            strides=tuple(each.stride() for each in outputs),
        )


@dataclass(frozen=True)
class Halves:
    """The two halves of a backward graph.

    Attributes:
        first: Returns the gradients of `inputs`, then the values of `passed`. Takes what the whole
            graph takes.
        second: Returns the gradients of `weights`. Takes the arguments of the whole graph with the
            numbers `reads`, then the values of `passed`.
        inputs: Numbers of the inputs of the forward pass with a gradient in the first half.
        weights: Numbers of those with a gradient in the second half.
        reads: Numbers of the arguments of the whole graph that the second half reads.
        passed: Number of values that the first half computes for the second.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    reads: tuple[int, ...]
    passed: int


def split_graph(backward: fx.GraphModule, is_weight: Sequence[bool]) -> Halves:
    """Cuts a graph that returns gradients, or None, into those of inputs and those of weights.

    Args:
        backward: The graph.
        is_weight: Whether each of the gradients is that of a weight.
    """
    found = [*enumerate(outputs_of(backward))]
    wanted = [(number, node) for number, node in found if node is not None]
    inputs = [(number, node) for number, node in wanted if not is_weight[number]]
    weights = [(number, node) for number, node in wanted if is_weight[number]]
    arguments = backward.graph.find_nodes(op="placeholder")
    early = _needed(node for _, node in inputs)
    early |= {user for node in early for user in node.users if user.target is operator.getitem}
    late = _needed((node for _, node in weights), until=early | {*arguments})
    read = {each for node in late for each in node.all_input_nodes}
    read = (read | {node for _, node in weights}) - late
    reads = [number for number, node in enumerate(arguments) if node in read]
    passed = [node for node in backward.graph.nodes if node in read & early - {*arguments}]
    return Halves(
        first=_part(backward, arguments, early, [*(n for _, n in inputs), *passed]),
        second=_part(
            backward, [*(arguments[n] for n in reads), *passed], late, [n for _, n in weights]
        ),
        inputs=tuple(number for number, _ in inputs),
        weights=tuple(number for number, _ in weights),
        reads=tuple(reads),
        passed=len(passed),
    )


@dataclass(frozen=True)
class _Compiled:
    """The three compiled graphs of a function; callable like the function.

    Attributes:
        forward: Returns the outputs, then what the backward pass needs.
        first: First half of the backward pass.
        second: Second half.
        halves: What the halves take and return.
        differentiable: Whether each output has a gradient.
        strides: Strides of each output, with which its gradient must come.
    """

    forward: Compiled
    first: Compiled
    second: Compiled
    halves: Halves
    differentiable: tuple[bool, ...]
    strides: tuple[tuple[int, ...], ...]

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _Function.apply(*inputs, self)  # type: ignore[no-untyped-call]
        return result


class _Function(Function):
    """A compiled function, one node of the autograd graph that runs each half on request."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *inputs, compiled = arguments
        count = len(compiled.differentiable)
        found = compiled.forward(*inputs)
        outputs, saved = tuple(found[:count]), found[count:]
        ctx.compiled, ctx.between = compiled, None
        ctx.save_for_backward(*saved)
        pairs = zip(outputs, compiled.differentiable, strict=True)
        ctx.mark_non_differentiable(*(each for each, differs in pairs if not differs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        compiled: _Compiled = ctx.compiled
        halves = compiled.halves
        found: list[Tensor | None] = [None] * (len(ctx.needs_input_grad))
        weights = any(gradient_wanted(ctx, number) for number in halves.weights)
        if ctx.between is None or any(gradient_wanted(ctx, number) for number in halves.inputs):
            given = zip(grads, compiled.differentiable, compiled.strides, strict=True)
            tangents = [with_strides(each, strides) for each, differs, strides in given if differs]
            arguments = [*ctx.saved_tensors, *tangents]
            results = compiled.first(*arguments)
            for number, gradient in zip(halves.inputs, results, strict=False):
                found[number] = gradient
            passed = results[len(halves.inputs) :]
            ctx.between = [*(arguments[number] for number in halves.reads), *passed]
        if weights:
            between, ctx.between = ctx.between, None
            for number, gradient in zip(halves.weights, compiled.second(*between), strict=True):
                found[number] = gradient
        return tuple(found)


def _needed(
    nodes: Iterable[fx.Node], until: "set[fx.Node] | frozenset[fx.Node]" = frozenset()
) -> set[fx.Node]:
    """Returns the nodes that the given ones depend on, and these, without those of `until`."""
    found: set[fx.Node] = set()
    left = [*nodes]
    while left:
        node = left.pop()
        if node not in found and node not in until:
            found.add(node)
            left += node.all_input_nodes
    return found


def _part(
    whole: fx.GraphModule,
    arguments: Sequence[fx.Node],
    nodes: "set[fx.Node]",
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    """Returns a graph with some nodes of another, which takes the values of `arguments`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule(whole, graph)
