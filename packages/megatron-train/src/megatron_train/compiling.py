"""Compiles the stages of a run with torch.compile, each as a whole or layer by layer."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from megatron_parallel import Mesh
from torch import nn

from megatron_train.errors import TrainError

CompileScope = Literal["stage", "layer"]
"""What is one compiled function: a stage, or one layer."""


@runtime_checkable
class SharesCode(Protocol):
    """A layer that can make what differs between equal layers an input of its code."""

    def share_code(self, device: torch.device) -> None:
        """Prepares the layer for the compiler."""


def compile_stages(
    stages: Sequence[nn.Module],
    scope: CompileScope,
    mesh: Mesh,
    units: Callable[[nn.Module], Sequence[nn.Module]],
) -> list[nn.Module]:
    """Returns compiled stages.

    A stage is compiled at its first call, as one graph for each shape of its inputs. The compiler
    joins operations of neighbouring layers, and needs time in proportion to the number of layers.

    With the scope ``layer``, the compiled functions are the layers of a stage, of which equal ones
    share the code, and its output layer with the loss. The stage itself, hooks of modules and the
    additions of gradients run eagerly, so waiting for the weights of a layer is possible.

    Args:
        stages: The stages. With the scope ``layer`` they are changed and returned themselves.
        scope: What is one compiled function.
        mesh: Mesh of the run.
        units: Returns the layers of a stage.

    Raises:
        TrainError: The version of torch cannot compile stages with collectives.
    """
    require_whole_compiler(mesh, torch.__version__)
    if scope == "stage":
        return [_compiled(stage) for stage in stages]
    for stage in stages:
        for unit in units(stage):
            if isinstance(unit, SharesCode):
                unit.share_code(mesh.device)
            # Not `unit.compile()`, which compiles hooks as well.
            unit.forward = _compiled(unit.forward)
        loss = getattr(stage, "vocabulary_loss", None)
        if loss is not None:
            stage.vocabulary_loss = _compiled(loss)
    return list(stages)


def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def require_whole_compiler(mesh: Mesh, version: str) -> None:
    """Raises an error for torch before 2.13 on several ranks.

    There, compiled functions whose results are modified in place, such as collectives, silently
    have gradients of zero.
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    if mesh.world_size > 1 and (major, minor) < (2, 13):
        raise TrainError(
            f"--compile on {mesh.world_size} ranks needs torch 2.13 or later: torch {version} "
            "compiles collectives to functions without a gradient; update torch or leave "
            "--compile out"
        )
