"""Contact with parts of torch's compiler that may change between versions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def compile_graph(
    backend: str, graph: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Sequence[Any]]:
    """Returns a graph without gradients, compiled by a backend of torch.compile.

    Args:
        backend: Name of the backend.
        graph: The operations, with flat inputs and outputs.
        inputs: Inputs without values.
    """
    from torch._dynamo import lookup_backend

    with torch.no_grad():
        compiled: Callable[..., Sequence[Any]] = lookup_backend(backend)(graph, [*inputs])
    return compiled


def differentiated(
    graph: fx.GraphModule, inputs: Sequence[Any], outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and backward pass of a graph.

    The forward graph returns the outputs, then what the backward graph needs. This one takes them,
    then the gradients of the outputs that have one, and returns a gradient or None for each input.
    As torch.compile does, it computes cheap operations again, which then need not be saved.

    Args:
        graph: The operations, with flat inputs and outputs.
        inputs: Inputs without values.
        outputs: Number of outputs.

    Raises:
        RuntimeError: The graph changes its inputs or returns views of them.
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    joint: Any = aot_export_joint_simple(
        graph, tuple(inputs), trace_joint=True, decompositions=select_decomp_table()
    )
    forward, backward = min_cut_rematerialization_partition(
        joint, (tuple(inputs), ()), num_fwd_outputs=outputs
    )
    return forward, backward
