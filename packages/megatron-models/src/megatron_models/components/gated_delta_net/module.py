"""A gated delta net: projection, convolution, delta rule, gated norm, output projection."""

from functools import partial

import torch
from jaxtyping import Float
from megatron_kernels import causal_conv, gated_delta_rule, pointwise
from megatron_parallel.recompute import activation_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.context import Context
from megatron_models.components.gated_delta_net.spec import GatedDeltaNetSpec
from megatron_models.components.norm.module import Norm
from megatron_models.components.recurrent_state import read_state, write_state
from megatron_models.placement import Placement


class GatedDeltaNet(nn.Module):
    """The gated delta net of one layer; the tensor-parallel axis cuts it by key heads.

    A rank holds the value heads of its key heads, so only the two projections communicate. Window
    and state start from zeros at each document, and padding does not enter them.

    Raises:
        ConfigError: The layout cannot cut a gated delta net.
    """

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, spec: GatedDeltaNetSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        spec.check_layout(placement.mesh.layout)
        self.layer = layer
        self.widths = list(spec.widths)
        self.mixed = spec.linear_group_conv_size
        self.value_width = spec.linear_value_head_dim
        placement.register_parameters(self, spec.own())
        self.in_proj = placement.column_parallel_linear(spec.in_proj)
        self.norm = Norm(spec.norm, placement)
        self.causal_conv = placement.bind(causal_conv)
        self.pointwise = placement.bind(pointwise)
        self.delta_rule = placement.bind(gated_delta_rule)
        self.out_proj = placement.row_parallel_linear(spec.out_proj)

    def forward(self, x: Float[Tensor, "part b h"], context: Context) -> Float[Tensor, "part b h"]:
        """Returns the output of each token.

        With sequence parallelism ``x`` and the result are this rank's part of the sequence, and
        the heads of this rank see the whole sequence.

        Raises:
            ConfigError: The cache of the context cannot store states.
        """
        cut = context.sequence_parallel
        fused = self.in_proj(x, sequence_parallel=cut)
        y = context.maybe_recompute("core_attn", partial(self._mix, context), fused)
        result: Tensor = self.out_proj(y, sequence_parallel=cut)
        return result

    def _mix(
        self, context: Context, fused: Float[Tensor, "s b g width"]
    ) -> Float[Tensor, "s b values"]:
        """Returns the gated outputs of this rank's value heads."""
        state = read_state(context, self.layer) or {}
        mixed, gate, beta, decay = torch.split(fused, [self.mixed, *self.widths[3:]], -1)
        convolved = self.causal_conv(
            mixed.flatten(2),
            self.conv_weight.flatten(0, 1),
            None,
            context.document_ids,
            state.get("conv"),
        )
        mixed = self.pointwise(convolved.output, "silu").view(mixed.shape)
        q, k, v = torch.split(mixed, self.widths[:3], -1)
        v = self._by_head(v)
        wide = torch.promote_types(fused.dtype, torch.float32)
        beta = torch.sigmoid(beta.flatten(2).to(wide))
        step = functional.softplus(decay.flatten(2).to(wide) + self.dt_bias.to(wide))
        log_decay = -torch.exp(self.A_log.to(wide)) * step
        y = self._recur(context, state.get("delta"), convolved.state, q, k, v, log_decay, beta)
        gated: Tensor = self.norm(y) * functional.silu(self._by_head(gate).to(wide))
        return gated.to(y.dtype).flatten(2)

    def _by_head(self, x: Float[Tensor, "s b g values"]) -> Float[Tensor, "s b n dv"]:
        """Returns the channels of value heads head by head."""
        return x.reshape(*x.shape[:2], -1, self.value_width)

    def _recur(
        self,
        context: Context,
        state: Tensor | None,
        window: Tensor,
        *inputs: Float[Tensor, "..."],
    ) -> Float[Tensor, "s b n dv"]:
        """Returns the outputs of the delta rule, and stores window and state if there is a cache.

        Without a cache only the inputs are saved, as fused kernels do.
        """
        run = partial(
            self.delta_rule,
            document_ids=context.document_ids,
            initial_state=state,
            l2_norm=True,
        )
        if context.cache is not None:
            found = run(*inputs)
            new = {"conv": window, "delta": found.state}
            write_state(context, self.layer, new, len(inputs[0]))
            return found.output
        plan = context.recompute
        if plan.granularity == "full" or plan.selects("core_attn"):
            return run(*inputs).output
        return activation_checkpoint(lambda *given: run(*given).output, *inputs)
