"""Defects of mixtures of experts: gradients, routes, losses."""

from collections.abc import Callable
from typing import Any

import megatron_models.components.moe.capacity as capacity
import megatron_models.components.moe.losses as losses
import megatron_models.components.moe.module as moe
import megatron_models.components.moe.router as router
import megatron_parallel.data_parallel.plan as plan
import megatron_parallel.expert_parallel.all_gather as all_gather
import megatron_parallel.sharding.step_state as state
import torch
from megatron_models.components.moe.capacity import ExpertCapacity
from megatron_models.components.moe.module import MoE
from megatron_models.components.moe.router import Router
from megatron_models.components.moe.routing import Routing
from megatron_parallel import Mesh, Sharding
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_parallel.data_parallel.plan import BucketPlan, Slot
from megatron_parallel.expert_parallel.all_gather import AllGatherDispatcher
from megatron_train.engine import StepEngine
from megatron_train.prove.defects import experts_divided
from torch import Tensor

from layouts.defects.catalogue import Replace, defect, replace_operation

# -- gradients -----------------------------------------------------------------------------------


defect("the gradient of experts is divided by the ranks that hold them", "dp2·ep2-moe")(
    experts_divided
)


@defect("the gradient of experts is summed over all data-parallel ranks", "dp2·ep2-moe")
def _summed_over_dp(mesh: Mesh, replace: Replace) -> None:
    replace(plan, "reduction_axis", lambda sharding: "dp_cp")


@defect("copies of experts do not sum their gradients", "dp4·ep2·a2a-moe")
def _copies_apart(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.launch

    def wrong(self: Bucket, own_largest: Tensor | None) -> None:
        if self.plan.axis == "expert_dp":
            self.launched = True
        else:
            true(self, own_largest)

    replace(Bucket, "launch", wrong)


@defect("the router's gradient is not summed over tensor-parallel ranks", "tp2-moe")
def _router_not_summed(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.reduce_extra_axes

    def wrong(self: Bucket) -> None:
        self.extra_axes = tuple(other for other in self.extra_axes if other.name != "tp")
        true(self)

    replace(Bucket, "reduce_extra_axes", wrong)


@defect("the weights of experts' outputs get no gradient", "dp2·ep2·a2a-moe")
def _weights_without_gradient(mesh: Mesh, replace: Replace) -> None:
    true = moe.unpermute
    replace_operation(
        replace, moe, "unpermute", lambda rows, order, weights: true(rows, order, weights.detach())
    )


@defect("partial outputs are not summed over expert-tensor-parallel ranks", "tp2-moe")
def _partial_answers(mesh: Mesh, replace: Replace) -> None:
    def wrong(rows: Tensor, sizes: Any, axis: Any, *, purpose: str = "") -> Tensor:
        return rows.split(list(sizes))[axis.index]

    replace(all_gather, "scatter_rows", wrong)


# -- state -----------------------------------------------------------------------------------------


def _not_observed_over(names: set[str], replace: Replace) -> None:
    true = state._reduction_axes
    replace(
        state,
        "_reduction_axes",
        lambda *row: [axis for axis in true(*row) if axis.name not in names],
    )


@defect(
    "the tokens of an expert are not summed over tensor-parallel ranks",
    "tp2·sp·ep2·etp1·a2a-biased",
)
def _tokens_of_one_tensor_rank(mesh: Mesh, replace: Replace) -> None:
    _not_observed_over({"tp"}, replace)


@defect("the tokens of an expert are not summed over data-parallel ranks", "dp2·ep2·a2a-biased")
def _tokens_of_one_data_rank(mesh: Mesh, replace: Replace) -> None:
    _not_observed_over({"dp", "dp_cp"}, replace)


@defect("the bias of an expert scales its output", "tp2·pp2-biased")
def _bias_weighs(mesh: Mesh, replace: Replace) -> None:
    true = Router._weigh

    def wrong(self: Router, scores: Tensor, experts: Tensor) -> Tensor:
        return true(self, scores, experts) + self.expert_bias[experts]

    if mesh.world_size > 1:
        replace(Router, "_weigh", wrong)


@defect("ranks select experts outside the groups of a token", "dp2·ep2·a2a-grouped")
def _no_groups(mesh: Mesh, replace: Replace) -> None:
    true = router.best_experts
    if mesh.world_size > 1:
        replace(router, "best_experts", lambda ranking, top_k, groups=None: true(ranking, top_k))


@defect("the factor on weights is applied twice", "dp2·ep2·a2a-grouped")
def _scaled_twice(mesh: Mesh, replace: Replace) -> None:
    true = Router._weigh

    def wrong(self: Router, scores: Tensor, experts: Tensor) -> Tensor:
        return true(self, scores, experts) * self.spec.moe_router_topk_scaling_factor

    if mesh.world_size > 1:
        replace(Router, "_weigh", wrong)


@defect("every tensor-parallel rank has the noise of the first", "tp2-grouped")
def _noise_of_first(mesh: Mesh, replace: Replace) -> None:
    true = MoE._noise

    def wrong(self: MoE, context: Any, cut: bool) -> Any:
        own = self._own_rows
        self._own_rows = lambda rows, *more: rows.chunk(self.tp.size)[0]  # type: ignore[method-assign]
        key = true(self, context, cut)
        self._own_rows = own  # type: ignore[method-assign]
        return key

    replace(MoE, "_noise", wrong)


# -- capacity ------------------------------------------------------------------------------------


@defect("the capacity of experts is that of the tokens of one rank", "tp2·dp2·ep2-earliest")
def _capacity_of_one_rank(mesh: Mesh, replace: Replace) -> None:
    true = ExpertCapacity.capacity
    ranks = mesh.axis("tp").size
    replace(
        ExpertCapacity,
        "capacity",
        lambda self, shape: true(self, (shape[0] // ranks, shape[1])),
    )


@defect(
    "the earliest tokens are those of the first rank of the sequence",
    "cp2·dp2·ep4·a2a-earliest-dropout",
)
def _earliest_by_rank(mesh: Mesh, replace: Replace) -> None:
    true = ExpertCapacity._indices

    def wrong(self: ExpertCapacity, *arguments: Any) -> Tensor:
        found = true(self, *arguments)
        return torch.arange(len(found)) + len(found) * self.axis.index

    replace(ExpertCapacity, "_indices", wrong)


@defect("an expert keeps the smallest weights", "dp2·ep2·a2a-dropping")
def _smallest_weights(mesh: Mesh, replace: Replace) -> None:
    true = capacity.kept_choices

    def wrong(experts: Tensor, weights: Tensor, *rest: Any, **options: Any) -> Tensor:
        return true(experts, -weights, *rest, **options)

    replace(capacity, "kept_choices", wrong)


# -- denominators and statistics -----------------------------------------------------------------


@defect("every rank divides the losses of routers by its own tokens", "dp2·ep2-moe")
def _own_tokens(mesh: Mesh, replace: Replace) -> None:
    true = StepEngine.denominators

    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        found, own = true(self, batches), self.task.denominators(batches)
        ranks = mesh.axis("dp").size
        return found | {name: ranks * own[name] for name in self.task.auxiliary_losses}

    replace(StepEngine, "denominators", wrong)


@defect("the load of experts is counted on each tensor-parallel rank alone", "tp2-moe")
def _load_of_one_rank(mesh: Mesh, replace: Replace) -> None:
    replace(losses, "all_reduce", lambda t, axis, *, purpose: t)


@defect("padding is routed", "dp2·ep2-moe")
def _padding_routed(mesh: Mesh, replace: Replace) -> None:
    true = Router.forward

    def wrong(self: Router, x: Tensor, routed: Tensor | None, *more: Any) -> Routing:
        return true(self, x, None, *more)

    replace(Router, "forward", wrong)


@defect("every sequence-parallel rank has the padding of the first", "tp2·sp·ep2·etp1·a2a-moe")
def _padding_of_first(mesh: Mesh, replace: Replace) -> None:
    true = MoE._own_tokens

    def wrong(self: MoE, x: Tensor, padding: Tensor | None, cut: bool) -> Any:
        if padding is not None:
            padding = torch.cat([padding.chunk(self.tp.size)[0]] * self.tp.size)
        return true(self, x, padding, cut)

    replace(MoE, "_own_tokens", wrong)


@defect("tokens reach the experts of the first rank on every rank", "dp2·ep2-moe")
def _expert_offset(mesh: Mesh, replace: Replace) -> None:
    true = AllGatherDispatcher.__init__

    def wrong(self: AllGatherDispatcher, *arguments: Any) -> None:
        true(self, *arguments)
        self.first = 0

    replace(AllGatherDispatcher, "__init__", wrong)


# -- norm ----------------------------------------------------------------------------------------


@defect("the norm counts copies of experts", "dp4·ep2·a2a-moe")
def _norm_counts_copies(mesh: Mesh, replace: Replace) -> None:
    _counted_whole(replace, lambda plan, slot: plan.axis == "expert_dp")


@defect("the norm leaves out the experts of other data-parallel ranks", "dp2·ep2-moe")
def _norm_without_experts(mesh: Mesh, replace: Replace) -> None:
    own = mesh.axis("dp_cp").index
    _numbered(replace, lambda sharding, true: own if sharding.experts else true)


@defect("the norm counts attention sinks on every rank", "dp2·ep2-moe")
def _norm_counts_sinks(mesh: Mesh, replace: Replace) -> None:
    _counted_whole(replace, lambda plan, slot: slot.shape == (8,))


def _counted_whole(replace: Replace, chosen: Callable[[BucketPlan, Slot], bool]) -> None:
    """Adds whole gradients to the norm on every data-parallel rank."""
    true = Bucket.shard_gradients

    def wrong(self: Bucket) -> dict[str, Tensor]:
        whole = {slot.name for slot in self.plan.slots if chosen(self.plan, slot)}
        return {**true(self), **{n: g for n, g in self.gradients().items() if n in whole}}

    replace(Bucket, "shard_gradients", wrong)


def _numbered(replace: Replace, number: Any) -> None:
    true = Sharding.replica

    def wrong(self: Sharding, mesh: Mesh, **options: Any) -> int:
        return int(number(self, true(self, mesh, **options)))

    replace(Sharding, "replica", wrong)
