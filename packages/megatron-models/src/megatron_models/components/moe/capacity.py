"""The capacity of experts: which tokens an expert drops (Lepikhin et al. 2021, section 2.2).

With a capacity factor an expert accepts ``ceil(tokens * k / E * factor)`` tokens of a micro-batch,
and drops the rest. A token that all its experts drop passes in the residual stream only. The
weights of its other experts do not change.

*Tokens* are all of the micro-batch, padding included, on all its tensor- and context-parallel
ranks. So the dropped tokens are the same in every layout. Megatron-LM counts the tokens of each
rank alone, which is the same on one rank. Padding is not routed and takes no capacity.

An expert keeps the tokens with the largest weights (``probs``) or the earliest ones (``position``):
by index in the sequence, then by index of the sequence in the micro-batch. Among equal weights it
keeps the earliest. Weights are compared as multiples of `STEP`: equal tokens, such as the first
ones of documents, have equal weights only up to rounding errors, which depend on the layout.
"""

from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from megatron_parallel import Mesh
from megatron_parallel.collectives import all_gather
from megatron_parallel.expert_parallel import micro_batches_of_experts
from torch import Tensor
from torch.nn import functional

from megatron_models.components.context import Context
from megatron_models.components.moe.spec import MoESpec

STEP: Final = 2.0**-16
"""Weights that round to the same multiple are equal."""


class ExpertCapacity:
    """Drops the tokens of one layer that exceed the capacity of an expert.

    Args:
        spec: Description of the layer, with a capacity factor.
        mesh: Mesh of this rank.
    """

    def __init__(self, spec: MoESpec, mesh: Mesh) -> None:
        self.spec = spec
        self.tp, self.cp = mesh.axis("tp"), mesh.axis("cp")
        self.axis = mesh.axis("tp_cp" if self.cp.size > 1 else "tp")
        self.batches = micro_batches_of_experts(mesh)

    def limit(
        self,
        experts: Int[Tensor, "n k"],
        weights: Float[Tensor, "n k"],
        shape: tuple[int, int],
        context: Context,
    ) -> Int[Tensor, "n k"]:
        """Returns the experts of this rank's tokens, with -1 for those that drop a token.

        Args:
            experts: Experts of this rank's tokens; -1 for none.
            weights: Weights of the experts.
            shape: Length of the sequence on all tensor-parallel ranks together, and sequences of
                the micro-batch.
            context: State of the forward pass.
        """
        count, choices = experts.shape
        indices = self._indices(shape, context, experts.device)
        own = torch.cat([experts.double(), weights.detach().double(), indices[:, None].double()], 1)
        whole = all_gather(own, self.axis, purpose="choices of experts")
        kept = kept_choices(
            whole[:, :choices].long(),
            whole[:, choices:-1],
            whole[:, -1].long(),
            capacity=self.capacity(shape),
            by_weight=self.spec.moe_token_drop_policy == "probs",
        )
        first = count * self.axis.index
        return experts.masked_fill(~kept[first : first + count], -1)

    def capacity(self, shape: tuple[int, int]) -> int:
        """Returns the tokens of the micro-batch that each expert accepts."""
        tokens = shape[0] * shape[1] * self.cp.size
        return self.spec.expert_capacity(tokens, self.spec.moe_router_topk, self.spec.num_experts)

    def rows(self, shape: tuple[int, int]) -> int:
        """Returns the largest number of rows of an expert on this rank.

        It has rows of every micro-batch whose ranks share the experts.
        """
        return self.capacity(shape) * self.batches

    def _indices(
        self, shape: tuple[int, int], context: Context, device: torch.device
    ) -> Int[Tensor, " n"]:
        """Returns the index of each token of this rank, in the order of `position`."""
        length, batch = shape
        samples = torch.arange(batch, device=device)
        if context.context_parallel is None:
            found = torch.arange(length * batch, device=device)
        else:
            split = context.context_parallel.split.indices[self.cp.index].to(device)
            found = (split.expand(batch, -1).t() * batch + samples).flatten()
        found = functional.pad(found, (0, -len(found) % self.tp.size))
        return found.chunk(self.tp.size)[self.tp.index]


def kept_choices(
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    indices: Int[Tensor, " n"],
    *,
    capacity: int,
    by_weight: bool,
) -> Bool[Tensor, "n k"]:
    """Returns whether each choice is within the capacity of its expert.

    Args:
        experts: Experts of all tokens of the micro-batch; -1 for none, which is never kept.
        weights: Weights of the experts.
        indices: Index of each token, by which the earliest token is determined.
        capacity: Tokens that each expert accepts.
        by_weight: Whether an expert keeps the largest weights instead of the earliest tokens.
    """
    flat = experts.flatten()
    order = torch.argsort(indices.repeat_interleave(experts.shape[1]), stable=True)
    if by_weight:
        rounded = (weights.flatten().index_select(0, order) / STEP).round()
        order = order.index_select(0, torch.argsort(rounded, descending=True, stable=True))
    by_expert = torch.argsort(flat.index_select(0, order), stable=True)
    order = order.index_select(0, by_expert)  # by expert, then by preference
    ordered = flat.index_select(0, order)
    begins = torch.searchsorted(ordered, ordered)  # of the expert's choices
    ranks = torch.arange(len(flat), device=flat.device) - begins
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept.index_copy_(0, order, (ranks < capacity) & (ordered >= 0))
    return kept.view(experts.shape)
