"""What attention does to the heads of a rank before and after the scores."""

import torch
from jaxtyping import Float
from megatron_parallel import Axis
from megatron_parallel.collectives import gather_sequence
from torch import Tensor


def gated(
    y: Float[Tensor, "s b n d"], gate: Float[Tensor, "s b g m d"] | None = None
) -> Float[Tensor, "s b n d"]:
    """Returns the output of heads times the sigmoid of their gates, in at least float32."""
    if gate is None:
        return y
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (y * torch.sigmoid(gate.to(wide)).flatten(2, 3)).to(y.dtype)


def gather_query_group(
    part: Float[Tensor, "s b 1 rows_part"], tp: Axis, ranks_per_group: int
) -> Float[Tensor, "s b 1 rows"]:
    """Gathers the fused projection of all groups from parts of their rows; returns one group."""
    rows = gather_sequence(part.squeeze(2).movedim(-1, 0), tp)
    width = rows.shape[0] * ranks_per_group // tp.size
    own = rows.narrow(0, tp.index // ranks_per_group * width, width)
    # A copy: a view would keep all groups in memory, and fused kernels do not take its strides.
    return own.movedim(0, -1).contiguous().unsqueeze(2)
