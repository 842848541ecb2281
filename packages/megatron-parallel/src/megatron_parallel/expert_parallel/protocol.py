"""The interface of dispatchers, which `megatron_parallel.expert_parallel.dispatch` describes."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from megatron_parallel._compat import outside_graphs
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver

Result = TypeVar("Result")

DISPATCH: Final = "dispatched tokens"
COMBINE: Final = "combined tokens"
"""Purposes of the messages in `Traffic`, in both passes."""


class RowOps(NamedTuple):
    """Operations on rows that a dispatcher uses, such as those of megatron-kernels.

    Attributes:
        sort: `sort(experts [n, k], num_experts) -> (order [n * k], counts [e])`. Indices that are
            not those of experts come last and are not counted.
        permute: `permute(tokens [n, h], order [m], k) -> rows [m, h]`. A choice is in `order` once
            or not at all; -1 is a row of no choice, which may be a copy of any token.
        unpermute: `unpermute(rows [m, h], order [m], weights [n, k]) -> tokens [n, h]`, the sums of
            the rows of each token. Rows of no choice are in no sum.
    """

    sort: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    permute: Callable[[Tensor, Tensor, int], Tensor]
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertRows(NamedTuple):
    """The rows of a rank's experts.

    Attributes:
        rows: `[m, h]`, sorted by local expert.
        counts: `[e]`, rows of each expert of this rank, on the device.
        has_tail: Whether rows that belong to no expert may follow. Experts must return zeros for
            them, and their gradients must be zero.
    """

    rows: Float[Tensor, "m h"]
    counts: Int[Tensor, " e"]
    has_tail: bool


class RowLimits(NamedTuple):
    """What the caller knows about the rows of experts.

    Attributes:
        per_expert: Largest number of tokens of a micro-batch, on all its tensor- and
            context-parallel ranks, that have one expert. None if it has no limit but the tokens.
        all_routed: Whether every choice of every token is an expert.
        static: Whether to send `per_expert` rows for each expert, however many there are, instead
            of waiting for their number.
    """

    per_expert: int | None = None
    all_routed: bool = False
    static: bool = False


@outside_graphs
def uncompiled(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns `function(*arguments)`; compiled code calls it as it is, between two graphs."""
    return function(*arguments)


@runtime_checkable
class Combine(Protocol):
    """Outputs of the experts in flight to the ranks of their tokens."""

    def wait(self) -> Float[Tensor, "n h"]:
        """Returns the weighted sum of the expert outputs of each token; zero without experts."""


@runtime_checkable
class Dispatch(Protocol):
    """Tokens in flight to the ranks of their experts."""

    def wait(self) -> ExpertRows:
        """Returns this rank's rows, sorted by local expert, and the number for each expert."""

    def combine(self, rows: Float[Tensor, "m h"]) -> Combine:
        """Starts to send the outputs back. `rows` are partial sums over `expert_tp`."""


@runtime_checkable
class Route(Protocol):
    """The way of each token to its experts, before tokens are sent."""

    @property
    def overflow(self) -> Int[Tensor, ""] | None:
        """Number of choices of this rank's tokens or experts that exceed the bound of the factor.

        On the device, and None without a factor.
        """

    @property
    def changes(self) -> bool:
        """Whether a rank's number of rows changes from step to step, without a bound.

        Compiled code would be compiled again for each number: call `dispatch`, the experts and
        `Dispatch.combine` by `uncompiled`.
        """

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> Dispatch:
        """Starts to send tokens. Must be called once.

        If `overflow` is not zero, outputs of tokens that have rows are NaN: a step that lost
        choices is never used.

        Args:
            tokens: Tokens of this rank.
            weights: Weights of the chosen experts, in float32 or wider.
            interleaver: Lets another micro-batch compute while this one waits, in forward and
                backward pass.

        Raises:
            LayoutError: An `interleaver` was given to a dispatcher that communicates synchronously.
        """


@runtime_checkable
class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts."""

    def route(self, experts: Int[Tensor, "n k"], limits: RowLimits = ...) -> Route:
        """Sorts choices by expert and exchanges their numbers.

        Args:
            experts: Indices of the chosen experts of each token; -1 for none (padding). The number
                of tokens may differ between ranks if `alltoall` has no bound.
            limits: What is known about the rows.
        """
