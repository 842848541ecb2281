"""The layers of multi-token prediction, and their losses (DeepSeek-AI 2024, section 2.2)."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from megatron_parallel.collectives import gather_from_axis, scatter_to_axis
from megatron_parallel.recompute import ShardSavedTensors, activation_checkpoint
from torch import Tensor, nn

from megatron_models.components.block import Block
from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import EMBEDDING
from megatron_models.components.embedding.module import Embedding
from megatron_models.components.multi_token.spec import MultiTokenSpec, multi_token_loss
from megatron_models.components.multi_token.tokens import FutureTokens
from megatron_models.components.norm.module import Norm
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement

TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Returns the loss of each token ``[b, s]`` from a stream and labels ``[b, s]``."""


class MultiTokenLayer(nn.Module):
    """One depth: joins the stream with the embeddings of later tokens, and runs a layer on both.

    The projection is cut over its outputs by tensor parallelism. They are gathered after it, and
    with sequence parallelism each rank keeps its part of the sequence.
    """

    def __init__(self, spec: MultiTokenSpec, placement: Placement) -> None:
        super().__init__()
        self.tp = placement.mesh.axis("tp")
        self.sequence_parallel = placement.sequence_parallel
        self.enorm = Norm(spec.norm, placement)
        self.hnorm = Norm(spec.norm, placement)
        self.eh_proj = placement.column_parallel_linear(spec.projection)
        self.layer = Block(spec.layer, spec.number, placement)
        self.final_norm = Norm(spec.norm, placement)

    def forward(
        self,
        x: Float[Tensor, "part b h"],
        embedding: Float[Tensor, "part b h"],
        context: Context,
    ) -> Float[Tensor, "part b h"]:
        """Returns the stream of this depth from that of the depth before."""
        y = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(x)), -1))
        y = gather_from_axis(y, self.tp)
        if self.sequence_parallel:
            y = scatter_to_axis(y, self.tp, dim=0)
        stream: Tensor = self.final_norm(self.layer(y, context))
        return stream


class MultiTokenPrediction(nn.ModuleList):
    """All depths of multi-token prediction, on the stage with the output layer.

    Its losses enter the objective through `megatron_parallel.AuxiliaryLosses`: the loss of each
    depth, summed over its labels, weighs ``mtp_loss_scaling_factor / depths``. They do not change
    the output, so only training computes them.
    """

    def __init__(self, specs: Sequence[MultiTokenSpec], placement: Placement) -> None:
        super().__init__(MultiTokenLayer(spec, placement) for spec in specs)
        self.specs = tuple(specs)
        self.tp = placement.mesh.axis("tp")

    def attach_losses(
        self,
        losses: Float[Tensor, "b s"],
        x: Float[Tensor, "part b h"],
        future: FutureTokens,
        embedding: Embedding,
        context: Context,
        token_losses: TokenLosses,
    ) -> Float[Tensor, "b s"]:
        """Returns the model's losses with those of all depths attached.

        They are attached at the end of the graph, so that no use of the output layer is an input of
        another: a split backward pass would run the nodes between them twice.

        Args:
            losses: The loss of each token.
            x: The stream after the model's final norm.
            future: Tokens and labels of all depths.
            embedding: The model's embedding.
            context: State of the pass, with auxiliary losses.
            token_losses: The model's output layer with its loss.

        Raises:
            ConfigError: The tokens are for another number of depths, or there are no auxiliary
                losses.
        """
        collected = context.auxiliary_losses
        if collected is None:
            raise ConfigError("future tokens need auxiliary_losses, which their losses enter")
        if future.depths != len(self):
            raise ConfigError(
                f"future tokens have {future.depths} depths, but mtp_num_layers is {len(self)}; "
                "shift them by as many depths as the model predicts"
            )
        for spec, module, depth in zip(self.specs, self, _depths(future), strict=True):
            tokens, labels, mask, positions = depth
            embedded = embedding(tokens, positions, 0, context.sequence_parallel)
            embedded = context.hidden_dropout(embedded, spec.number, EMBEDDING)
            x = self._advance(module, x, embedded, context)
            losses = collected.attach(
                losses,
                multi_token_loss(spec.depth),
                (token_losses(x, labels) * mask).sum(),
                spec.config.mtp_loss_scaling_factor / len(self),
                replicated=(self.tp,),
            )
        return losses

    def _advance(
        self, module: nn.Module, stream: Tensor, embedded: Tensor, context: Context
    ) -> Tensor:
        """Returns the stream of a depth, which `uniform` recomputation saves nothing of."""
        plan = context.recompute
        if plan.granularity != "full" or plan.method != "uniform":
            found: Tensor = module(stream, embedded, context)
            return found
        hooks = ShardSavedTensors(self.tp) if plan.distribute_saved_activations else None
        run = partial(module, context=context)
        return activation_checkpoint(run, stream, embedded, hooks=hooks)


def _depths(future: FutureTokens) -> Iterable[tuple[Tensor, ...]]:
    """Yields tokens, labels, mask and positions of each depth."""
    return zip(*(values.unbind(-1) for values in future), strict=True)
