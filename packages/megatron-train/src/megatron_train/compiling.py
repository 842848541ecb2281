"""Compiles the stages of a run with torch.compile, each as a whole or layer by layer."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

import torch
from megatron_parallel import Mesh
from torch import nn

from megatron_train.errors import TrainError

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

CompileScope = Literal["stage", "layer"]
"""What is one compiled function: a stage, or one layer."""


@runtime_checkable
class SharesCode(Protocol):
    """A layer that can make what differs between equal layers an input of its code."""

    def share_code(self, device: torch.device) -> None:
        """Prepares the layer for the compiler."""


def compile_stages(chunks: Sequence[nn.Module]) -> None:
    """Compiles the forward pass of each stage as one graph for each shape of its inputs.

    The compiler joins operations of neighbouring layers, and needs time in proportion to the number
    of layers. After the first call only inputs, tensors and ``training`` of a stage may change: its
    other attributes and its hooks are constants of its code, which no call checks again.

    Args:
        chunks: The stages, which are changed.
    """
    for chunk in chunks:
        chunk.forward = torch.compile(
            _with_own_code(chunk.forward),
            dynamic=False,
            options={"guard_filter_fn": _changing},
        )


def _with_own_code(stage_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `stage_forward` and shares no compiled code with others.

    torch finds compiled code by the code object, which methods of equal modules share.
    """

    def stage(*inputs: Any, **named: Any) -> Any:
        return stage_forward(*inputs, **named)

    stage.__code__ = stage.__code__.replace()
    return stage


_CONSTANT: Final = re.compile(r"(\w+\()*(stage_forward\b|G\[)")
"""Names of what compiled code of a stage reaches by the stage itself, or by globals."""


def _changing(guards: Sequence["GuardFilterEntry"]) -> list[bool]:
    """Returns which conditions of compiled code a call has to check.

    The compiler has one for each attribute, function and constant that it meets, 1,270 for a GPT of
    4 layers. Checking them takes as long as a third of all other work of the host. Where a graph
    breaks, the functions within the stage have code and conditions of their own, which several
    layers share, so that all are checked.
    """
    return [
        not _CONSTANT.match(each.name)
        or each.guard_type == "TENSOR_MATCH"
        or each.name.endswith(".training")
        for each in guards
    ]


def compile_layers(
    stages: Sequence[nn.Module],
    units: Callable[[nn.Module], Sequence[nn.Module]],
    device: torch.device,
    backend: Callable[..., Any] | None = None,
) -> None:
    """Compiles the layers of stages, of which equal ones share the code, and losses with outputs.

    The stage itself, hooks of modules and the additions of gradients run eagerly, so waiting for
    the weights of a layer is possible.

    Args:
        stages: The stages, which are changed.
        units: Returns the layers of a stage.
        device: Device of the model.
        backend: Backend of torch.compile, such as `SplitBackend`. Defaults to inductor.
    """
    compiled: Callable[[Any], Any] = partial(torch.compile, dynamic=False)
    if backend is not None:
        compiled = partial(torch.compile, dynamic=False, backend=backend)
    for stage in stages:
        for unit in units(stage):
            if isinstance(unit, SharesCode):
                unit.share_code(device)
            # Not `unit.compile()`, which compiles hooks as well.
            unit.forward = compiled(unit.forward)
        loss = getattr(stage, "vocabulary_loss", None)
        if loss is not None:
            stage.vocabulary_loss = compiled(loss)


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
