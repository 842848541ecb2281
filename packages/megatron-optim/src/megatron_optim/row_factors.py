"""Factors of the rows of parameters, which are multiplied after the update of a step.

QK-Clip (Kimi Team 2025, "Kimi K2", section 2.1) bounds attention scores in this way. The main
parameters are scaled, in whichever shards this rank has, and the model's parameters follow.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_optim.mixed_precision import MainParameters
from megatron_optim.stored import Stored

RowFactors = Mapping[str, Float[Tensor, "..."]]
"""Factors by global name. Their dims are the first dims of the global parameter."""


@torch.no_grad()
def scale_rows(main: MainParameters, factors: RowFactors, *, rounds: bool) -> None:
    """Multiplies rows of main parameters in place.

    Args:
        main: The main parameters. Names that this rank does not update are left out.
        factors: The factors, equal on all ranks that share a parameter.
        rounds: Whether to round scaled copies into the parameters of the model. Those that are
            stored in another form are always rounded.
    """
    for name, factor in factors.items():
        if name not in main.tensors or not main.tensors[name].numel():
            continue
        stored = main.stored.get(name)
        values = main.tensors[name].detach() if stored is None else stored.load_all()
        for view in main.views({name: values})[name]:
            box = zip(view.offsets, view.lengths, strict=True)
            slices = [slice(start, start + size) for start, size in box]
            rows = factor[tuple(slices[: factor.dim()])]
            shape = (*rows.shape, *(1,) * (view.tensor.dim() - factor.dim()))
            view.tensor.mul_(rows.view(shape).to(view.tensor.dtype))
        if isinstance(stored, Stored):
            stored.store_all(values)
        elif rounds and name in main.copies:
            main.rounded[name].copy_(values)
