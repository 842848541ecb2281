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


def compile_stages(chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns compiled stages, each one graph for each shape of its inputs.

    The compiler joins operations of neighbouring layers, and needs time in proportion to the number
    of layers.
    """
    return [_compiled(chunk) for chunk in chunks]


def compile_layers(
    stages: Sequence[nn.Module],
    units: Callable[[nn.Module], Sequence[nn.Module]],
    device: torch.device,
) -> None:
    """Compiles the layers of stages, of which equal ones share the code, and losses with outputs.

    The stage itself, hooks of modules and the additions of gradients run eagerly, so waiting for
    the weights of a layer is possible.

    Args:
        stages: The stages, which are changed.
        units: Returns the layers of a stage.
        device: Device of the model.
    """
    for stage in stages:
        for unit in units(stage):
            if isinstance(unit, SharesCode):
                unit.share_code(device)
            # Not `unit.compile()`, which compiles hooks as well.
            unit.forward = _compiled(unit.forward)
        loss = getattr(stage, "vocabulary_loss", None)
        if loss is not None:
            stage.vocabulary_loss = _compiled(loss)


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
