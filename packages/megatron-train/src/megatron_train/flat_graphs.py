"""Graphs that torch.compile captured: flat inputs, flat outputs, and the tensors between."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megatron_train import _compat

Compiled = Callable[..., Sequence[Any]]
"""A compiled graph: takes tensors and returns a sequence of tensors, or None."""


def compile_nodes(inner: str, graph: fx.GraphModule) -> Compiled:
    """Returns a graph whose nodes know their shapes, compiled without gradients.

    Args:
        inner: Name of a backend of torch.compile.
        graph: The operations.
    """
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    compiled: Compiled = _compat.compile_graph(inner, graph, examples)
    return compiled


def needs_gradient(each: Any) -> bool:
    """Returns whether an input is a tensor that needs a gradient."""
    return isinstance(each, Tensor) and each.requires_grad


def outputs_of(graph: fx.GraphModule) -> list[Any]:
    """Returns the nodes that a graph returns, and None for None."""
    returned: Any = graph.graph.output_node().args[0]
    return [*returned]


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns a tensor with the strides that compiled code was made for."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
