"""Defects of learning rates that depend on the width of a parameter."""

from megatron_optim import optimizer
from megatron_optim.rules import Adam
from megatron_optim.width import WidthRatio
from megatron_parallel import Mesh

from layouts.defects.catalogue import Replace, defect


@defect("the last stage forgets the learning rates of its widths", "tp2·pp2-mup")
def _last_stage_without_widths(mesh: Mesh, replace: Replace) -> None:
    true = optimizer.build_parameter_groups
    if mesh.axis("pp").index == 1:
        replace(optimizer, "build_parameter_groups", lambda *most: true(*most[:-1], {}))


@defect("the epsilon of Adam is the same for all widths", "tp2·pp2-mup")
def _one_epsilon(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: Adam, width: WidthRatio) -> tuple[Adam, float]:
        return self, 1 / width.inputs

    replace(Adam, "for_width", wrong)
