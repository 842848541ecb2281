"""Mamba-2: projection, causal convolution, scan and gated norm."""

from collections.abc import Mapping
from functools import partial

import torch
from jaxtyping import Float
from megatron_kernels import causal_conv, pointwise, rms_norm, ssd_scan
from megatron_parallel import Sharding
from megatron_parallel.recompute import activation_checkpoint
from torch import Tensor, nn

from megatron_models.components.context import Context
from megatron_models.components.mamba.spec import MambaSpec
from megatron_models.components.recurrent_state import read_state, write_state
from megatron_models.placement import Placement


class _Weights(nn.Module):
    """The weight of a convolution or a norm, and a bias if it has one."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, shardings: Mapping[str, Sharding], placement: Placement) -> None:
        super().__init__()
        placement.register_parameters(self, shardings, "weight", "bias")


class Mamba(nn.Module):
    """A Mamba-2 layer; the tensor-parallel axis cuts it by groups of heads.

    The inputs of the two projections and the output of the first are saved. The backward pass
    recomputes the rest, whose matrices inside chunks would need several times as much memory.

    With context parallelism an exchange gives each rank the whole sequence of some groups, since
    the state of a token depends on all tokens before it.
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(self, spec: MambaSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.layer = layer
        self.epsilon, self.chunk_size = spec.norm_epsilon, spec.mamba_chunk_size
        self.head_size, self.state_size = spec.mamba_head_dim, spec.mamba_state_dim
        self.widths, self.dt_limits = spec.widths, spec.dt_limits
        self.in_proj = placement.column_parallel_linear(spec.in_proj)
        self.conv = _Weights(spec.conv(), placement)
        self.norm = _Weights(spec.norm(), placement)
        placement.register_parameters(self, spec.scan())
        self.causal_conv = placement.bind(causal_conv)
        self.pointwise = placement.bind(pointwise)
        self.ssd_scan = placement.bind(ssd_scan)
        self.rms_norm = placement.bind(rms_norm)
        self.out_proj = placement.row_parallel_linear(spec.out_proj)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Returns the output of each token, which depends on all tokens of its document before it.

        With sequence parallelism ``x`` and the result are this rank's part of the sequence.
        """
        cut, over_ranks = context.sequence_parallel, context.context_parallel
        fused = self.in_proj(x, sequence_parallel=cut)
        if over_ranks is not None:
            fused = over_ranks.scatter_heads(fused)
        core = partial(self._core, context)
        y = core(fused) if context.cache is not None else activation_checkpoint(core, fused)
        if over_ranks is not None:
            y = over_ranks.gather_heads(y)
        result: Tensor = self.out_proj(y.flatten(2), sequence_parallel=cut)
        return result

    def _core(self, context: Context, fused: Float[Tensor, "s b g w"]) -> Float[Tensor, "s b g md"]:
        """Returns the normed output of this rank's groups over the whole sequence."""
        own = partial(_own_part, context, fused.shape[2])
        per_group = self.widths[2]
        gate, inputs, dt = torch.split(fused, [*self.widths], -1)
        state = read_state(context, self.layer)
        bias = self.conv.bias
        mixed = self.causal_conv(
            inputs.flatten(2),
            own(self.conv.weight).flatten(0, 1),
            None if bias is None else own(bias).flatten(),
            context.document_ids,
            None if state is None else state["conv"],
        )
        active = torch.unflatten(self.pointwise(mixed.output, "silu"), 2, (fused.shape[2], -1))
        x, b, c = torch.split(active, [self.widths[0], self.state_size, self.state_size], -1)
        scanned = self.ssd_scan(
            torch.unflatten(x, 3, (-1, self.head_size)).flatten(2, 3),
            dt.flatten(2),
            -own(_wide(self.A_log), per_group).exp(),
            b,
            c,
            own(self.D, per_group),
            own(self.dt_bias, per_group),
            context.document_ids,
            None if state is None else state["scan"],
            self.chunk_size,
            self.dt_limits,
        )
        write_state(context, self.layer, {"conv": mixed.state, "scan": scanned.state}, len(fused))
        y = _wide(scanned.output.flatten(2).view(gate.shape)) * self.pointwise(_wide(gate), "silu")
        return self.rms_norm(y, None, self.epsilon).to(fused.dtype) * own(self.norm.weight)


def _own_part(context: Context, groups: int, parameter: Tensor, per_group: int = 1) -> Tensor:
    """Returns the rows of a parameter for the groups of this context-parallel rank."""
    if context.context_parallel is None:
        return parameter
    rows = groups * per_group
    return parameter.narrow(0, context.context_parallel.index * rows, rows)


def _wide(x: Tensor) -> Tensor:
    """Returns a tensor in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
