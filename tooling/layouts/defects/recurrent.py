"""Defects of Mamba-2 layers: states and windows over documents, groups, parts of parameters."""

from typing import Any

import megatron_models.components.mamba.module as mamba
from megatron_models.components.attention.context_parallel import ContextParallel
from megatron_parallel import Mesh
from megatron_parallel.context_parallel import gather_heads, scatter_heads
from torch import Tensor

from layouts.defects.catalogue import Replace, defect, replace_operation


@defect("the state of a scan runs on into the next document", "cp2-mamba")
def _state_runs_on(mesh: Mesh, replace: Replace) -> None:
    true = mamba.ssd_scan

    def wrong(*arguments: Any) -> Any:
        return true(*arguments[:7], None, *arguments[8:])

    replace_operation(replace, mamba, "ssd_scan", wrong)


@defect("a convolution over time reads the document before", "tp2·sp-mamba-dropout")
def _window_leaks(mesh: Mesh, replace: Replace) -> None:
    true = mamba.causal_conv

    def wrong(x: Tensor, weight: Tensor, bias: Any, ids: Any, state: Any) -> Any:
        return true(x, weight, bias, None if ids is None else ids.clamp(max=0), state)

    replace_operation(replace, mamba, "causal_conv", wrong)


@defect("later ranks leave out the bias of time steps", "tp4-mamba")
def _without_bias(mesh: Mesh, replace: Replace) -> None:
    true, index = mamba.ssd_scan, mesh.axis("tp").index

    def wrong(*arguments: Any) -> Any:
        bias = arguments[6] if index == 0 else None
        return true(*arguments[:6], bias, *arguments[7:])

    replace_operation(replace, mamba, "ssd_scan", wrong)


@defect("heads write to the state of another group", "cp2-mamba")
def _other_group(mesh: Mesh, replace: Replace) -> None:
    true = mamba.ssd_scan

    def wrong(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Any:
        return true(x, dt, a, b.roll(1, dims=2), *rest)

    replace_operation(replace, mamba, "ssd_scan", wrong)


@defect("every context-parallel rank has the decays of the first groups", "cp4·documents-mamba")
def _first_groups(mesh: Mesh, replace: Replace) -> None:
    def wrong(context: Any, groups: int, parameter: Tensor, per_group: int = 1) -> Tensor:
        return parameter.narrow(0, 0, groups * per_group)

    replace(mamba, "_own_part", wrong)


@defect("a state passes through the sequence in the order of the ranks", "cp2-mamba")
def _order_of_ranks(mesh: Mesh, replace: Replace) -> None:
    replace(ContextParallel, "scatter_heads", lambda self, x: scatter_heads(x, self.axis))
    replace(ContextParallel, "gather_heads", _gather)


def _gather(self: ContextParallel, x: Tensor) -> Tensor:
    return gather_heads(x, self.axis)
