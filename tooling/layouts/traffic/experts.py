"""Formulas for the communication of layers with experts; `formulas` has the others.

Every token of the counted model takes all experts (`moe_router_topk == num_experts`). So each rank
sends and receives equally many rows, for every state of the router.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_models import GPTConfig
from megatron_parallel import ParallelLayout


class Routed(NamedTuple):
    """The layers with experts of one stage in one step.

    Attributes:
        config: The model.
        layout: Degrees.
        dispatcher: `alltoall` or `allgather`.
        passes: Number of layers of the stage times micro-batches.
        tokens: Number of tokens of a micro-batch on one rank: `s b / t`.
        element: Bytes of an element of an activation.
    """

    config: GPTConfig
    layout: ParallelLayout
    dispatcher: str
    passes: int
    tokens: int
    element: int


def routed_layers(routed: Routed) -> Iterator[tuple[str, str, str, int, int]]:
    """Yields description, axis, operation, calls and bytes of all passes, forward and backward."""
    count = routed.config.num_experts
    for what, axis, operation, calls, nbytes in (
        *((all_to_all if routed.dispatcher == "alltoall" else all_gather)(routed)),
        ("choices of each expert", "tp", "all_reduce of routing counts", 1, 8 * count),
    ):
        if axis != "tp" or routed.layout.tp > 1:
            yield what, axis, operation, calls * routed.passes, nbytes * routed.passes


def all_to_all(routed: Routed) -> Iterator[tuple[str, str, str, int, int]]:
    """Yields the messages of dispatch and combine, forward and backward: a row for each choice."""
    count, choices = routed.config.num_experts, routed.config.moe_router_topk
    rows = routed.tokens * choices * routed.config.hidden_size * routed.element
    yield "rows for each expert", "ep", "all_to_all of expert counts", 1, 8 * count
    for purpose in ("dispatched tokens", "combined tokens"):
        what = "a row for each choice, forward and backward"
        yield what, "ep", f"all_to_all of {purpose}", 2, 2 * rows


def all_gather(routed: Routed) -> Iterator[tuple[str, str, str, int, int]]:
    """Yields the gathers of tokens to all ranks of the experts, and the sums of the outputs."""
    axis, ranks = "expert_tp_ep", routed.layout.expert_tp * routed.layout.ep
    rows = routed.tokens * routed.config.hidden_size * routed.element
    choices = routed.tokens * routed.config.moe_router_topk
    yield "int32 each choice", axis, "all_gather of chosen experts", 1, 4 * choices
    yield "float32 each choice", axis, "all_gather of combine weights", 1, 4 * choices
    yield "their gradient", axis, "reduce_scatter of combine weights", 1, 4 * choices * ranks
    for purpose in ("dispatched tokens", "combined tokens"):
        yield "a row each token", axis, f"all_gather of {purpose}", 1, rows
        yield "rows of all ranks", axis, f"reduce_scatter of {purpose}", 1, rows * ranks


def routed_parameters(config: GPTConfig, layout: ParallelLayout) -> dict[str, list[int]]:
    """Returns sizes of the parameters of a layer with experts without biases, by kind."""
    h, f = config.hidden_size, config.moe_ffn_hidden_size // layout.expert_tp
    experts = config.num_experts // layout.ep
    up = (2 if config.activation == "swiglu" else 1) * f * h
    return {"partial": [config.num_experts * h], "expert": [experts * up, experts * h * f]}
