"""The choice of backends for the operations of a model.

`Placement.backends` maps names of operations of `megatron_kernels` to names of backends.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import torch
from megatron_kernels import (
    AUTO,
    BackendChoice,
    KernelError,
    explain_on,
    find_operation,
    fuses_on,
)
from megatron_parallel import Mesh

from megatron_models.errors import ConfigError
from megatron_models.fused_operations import FUSED, SEPARATE
from megatron_models.kinds import find_kind
from megatron_models.models.model_config import ModelConfig
from megatron_models.placement import Placement

BLOCKS: Final = ("attention_forward", "attention_backward")
"""Operations of attention over context-parallel ranks."""


class _Recorder(Mapping[str, str]):
    """A choice of no backends that records the operations that modules ask for."""

    def __init__(self) -> None:
        self.operations: dict[str, None] = {}

    def __getitem__(self, name: str) -> str:
        self.operations[name] = None
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def operations_of(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the operations whose backend a model takes from its placement.

    The model is built without values. Blocks of attention over context-parallel ranks are included
    if the model has attention.
    """
    recorder = _Recorder()
    find_kind(config.kind).build(config, Placement(Mesh.single(), device="meta", backends=recorder))
    found = recorder.operations
    if config.attention_heads:
        found |= dict.fromkeys(BLOCKS)
    return tuple(found)


def check_backends(
    config: ModelConfig, backends: Mapping[str, str], further: Collection[str] = ()
) -> None:
    """Refuses names that do not exist, and operations that the model does not call.

    Args:
        config: The model's configuration.
        backends: Requested backends, as in `Placement.backends`.
        further: Operations that the products of its layers call.

    Raises:
        ConfigError: The message suggests the nearest name.
    """
    if not backends:
        return
    used = (*operations_of(config), *further)
    for name, backend in backends.items():
        try:
            operation = find_operation(name)
            if backend != AUTO and (backend != SEPARATE or name not in FUSED):
                operation.named(backend)
        except KernelError as error:
            raise ConfigError(str(error)) from None
        if name not in used:
            raise ConfigError(
                f"no layer of this model calls {name}; choose backends of {', '.join(used)}"
            )


def explain_backends(
    config: ModelConfig,
    backends: Mapping[str, str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> tuple[BackendChoice, ...]:
    """Returns which backend runs a small call of each operation of a model, and why.

    Blocks of attention over context-parallel ranks are included if their backend is requested, and
    fused operations also if one kernel computes them on the device.

    Args:
        config: The model's configuration.
        backends: Requested backends, as in `Placement.backends`.
        device: Device of the model.
        dtype: Dtype of the model.
        compiled: Whether torch.compile compiles the layers, as in `Placement`.

    Raises:
        ConfigError: A requested backend cannot run on this machine; the message has the reason.
    """
    choices = []
    for name in operations_of(config):
        operation, requested = find_operation(name), backends.get(name, AUTO)
        fused = name in FUSED and not compiled and fuses_on(operation, device, dtype)
        if requested == AUTO and compiled:
            requested = ",".join(backend.name for backend in operation.transparent)
        if requested == SEPARATE:
            choices.append(BackendChoice(name, SEPARATE, SEPARATE, ()))
        elif name in backends or fused or name not in (*BLOCKS, *FUSED):
            choices.append(explain_on(operation, requested, device=device, dtype=dtype))
    for choice in choices:
        if choice.backend is None:
            raise ConfigError(f"{choice.op} cannot use backend {choice.reason}")
    return tuple(choices)
