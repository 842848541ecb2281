"""A backward pass in two halves: first the gradients of a stage's inputs, later of its weights.

Qi et al. 2023 ("Zero Bubble Pipeline Parallelism") split a pass so that the previous stage can
continue. Weight gradients are computed later, when the rank would be idle.

    half = SplitBackward(outputs, gradients, inputs, module.parameters())
    ...send half.input_gradients...
    half.accumulate_weight_gradients()  # adds to .grad, without calling hooks

In the autograd graph, a *fork* is a node on a path to an input that also has a branch to a weight:
a matrix product, for instance. The first half runs the paths to the inputs and saves the gradients
that arrive at forks. The second half starts from these gradients. Nodes on branches to weights run
in the second half only, other nodes on the paths in the first half only, forks in both. A function
can query which of its gradients a pass needs (`gradient_wanted`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from megatron_parallel import _compat

Gradients = tuple[Tensor | None, ...]


def gradient_wanted(ctx: Any, index: int) -> bool:
    """Returns whether the running backward pass needs a gradient of a `torch.autograd.Function`.

    Each half of a split pass needs some of them, while `ctx.needs_input_grad` covers both halves.

    Args:
        ctx: Argument of the function's `backward`.
        index: Number of the input among the inputs of the function. Its tensors must come first.
    """
    return _compat.gradient_wanted(ctx, index)


class _Group(NamedTuple):
    """Forks and roots that lead to the same weights, and to no weight of another group."""

    forks: list[Node]
    roots: list[int]
    weights: list[Parameter]


class SplitBackward:
    """The backward pass of one micro-batch. The constructor runs the first half.

    Args:
        roots: What is differentiated: a loss, or edges of the graph at a stage's outputs.
        gradients: The gradient of each root; None for 1, the gradient of a loss.
        inputs: The tensors that the roots were computed from. The first half computes their
            gradients.
        parameters: The parameters whose gradients the second half adds.

    Attributes:
        input_gradients: The gradient of each input; None if no root depends on it or it needs none.
    """

    def __init__(
        self,
        roots: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        parameters: Iterable[Parameter],
    ) -> None:
        self._gradients = [
            torch.ones_like(cast(Tensor, root)) if gradient is None else gradient
            for root, gradient in zip(roots, gradients, strict=True)
        ]
        self._edges = [
            get_gradient_edge(root) if isinstance(root, Tensor) else root for root in roots
        ]
        wanted = [each for each in inputs if each.requires_grad]
        weights = {get_gradient_edge(p).node: p for p in parameters if p.requires_grad}
        ends = {get_gradient_edge(each).node for each in wanted}
        self._groups = _grouped([edge.node for edge in self._edges], ends, weights)
        self._arrived: dict[Node, Gradients] = {}
        found = iter(self._first_half(wanted))
        self.input_gradients: Gradients = tuple(
            next(found) if each.requires_grad else None for each in inputs
        )

    def _first_half(self, inputs: Sequence[Tensor]) -> Gradients:
        if not self._edges or not inputs:
            return (None,) * len(inputs)
        handles = [
            fork.register_prehook(lambda arrived, fork=fork: self._keep(fork, arrived))
            for group in self._groups
            for fork in group.forks
        ]
        try:
            return torch.autograd.grad(
                self._edges, inputs, self._gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, fork: Node, arrived: Gradients) -> None:
        self._arrived[fork] = arrived

    def accumulate_weight_gradients(self) -> None:
        """Runs the second half, adds the gradients to `.grad` and frees the graph."""
        # If a weight has several forks, autograd may run forks of other groups between them.
        for group in sorted(self._groups, key=lambda group: -len(group.forks)):
            self._second_half(group)
        self._groups, self._edges, self._gradients = [], [], []
        self._arrived.clear()

    def _second_half(self, group: _Group) -> None:
        edges = [self._edges[number] for number in group.roots]
        gradients = [self._gradients[number] for number in group.roots]
        handles = []
        for fork in group.forks:
            arrived = self._arrived[fork]
            for output, gradient in enumerate(arrived):
                if gradient is not None:
                    edges.append(GradientEdge(fork, output))
                    gradients.append(gradient)
            if len(group.forks) > 1:
                # Gradients from other forks of the group already arrived in the first half.
                handles.append(fork.register_prehook(lambda _, arrived=arrived: arrived))
        if not edges:
            return
        try:
            found = torch.autograd.grad(
                edges,
                group.weights,
                gradients,
                retain_graph=len(group.forks) > 1,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        _add_up(group.weights, found, gradients)


@torch.no_grad()
def _add_up(
    weights: Sequence[Parameter], found: Sequence[Tensor | None], other_gradients: Sequence[Tensor]
) -> None:
    """Adds gradients to `.grad`.

    Copies a gradient whose memory is shared with another tensor, or laid out in another order than
    its weight, such as that of a transposed weight. Autograd does so too, and optimizers update
    gradients and weights element by element in memory.
    """
    shared = {_compat.storage_identity(gradient) for gradient in other_gradients}
    for weight, gradient in zip(weights, found, strict=True):
        if gradient is None:
            continue
        if weight.grad is not None:
            weight.grad += gradient
            continue
        memory = _compat.storage_identity(gradient)
        if memory in shared or gradient.stride() != weight.stride():
            gradient = torch.empty_like(weight).copy_(gradient)
        weight.grad = gradient
        shared.add(memory)


def _grouped(
    roots: Sequence[Node], ends: set[Node], weights: dict[Node, Parameter]
) -> list[_Group]:
    """Returns the groups of forks and weights of the graph between `roots` and inputs (`ends`)."""
    order = _children_first(roots)
    on_way: set[Node] = set(ends)
    leads: set[Node] = set(weights)  # nodes on a branch to a weight
    above: dict[Node, Node] = {}  # parent of each node in its group, up to the group's first

    def first(node: Node) -> Node:
        while (parent := above.setdefault(node, node)) is not node:
            above[node] = above[parent]
            node = parent
        return node

    forks = []
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if any(child in on_way for child in children):
            on_way.add(node)
        aside = [child for child in children if child in leads and child not in on_way]
        if not aside:
            continue
        if node in on_way:
            forks.append(node)
        else:
            leads.add(node)
        for child in aside:
            above[first(child)] = first(node)
    groups: dict[Node, _Group] = defaultdict(lambda: _Group([], [], []))
    for fork in forks:
        groups[first(fork)].forks.append(fork)
    for number, root in enumerate(roots):
        if root in leads and root not in on_way:
            groups[first(root)].roots.append(number)
    for node, weight in weights.items():
        if first(node) in groups:
            groups[first(node)].weights.append(weight)
    return list(groups.values())


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Returns all nodes of the graph, each after the nodes that its gradient flows to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [
                (child, False)
                for child, _ in node.next_functions
                if child is not None and child not in seen
            ]
    return order
