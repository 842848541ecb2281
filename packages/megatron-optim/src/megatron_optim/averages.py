"""Exponential moving averages of parameters.

    averages = ParameterAverages(optimizer, decay=0.999)
    ...
    result = optimizer.step(lr)
    averages.update(result.skipped)
    with averages.in_model():
        ...evaluate

After update `n`, ``average = decay * average + (1 - decay) * parameter``; the first average is the
initial parameter (Polyak and Juditsky 1992; Tarvainen and Valpola 2017). The averages are those of
the main parameters: in fp32, or float64 for float64 parameters. A rank keeps those of the
parameters that it updates, so they are sharded as optimizer state is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from jaxtyping import Bool, Float
from megatron_parallel import View
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.optimizer import Optimizer

AVERAGE_SUFFIX: Final = "ema"
"""The suffix of averages in checkpoints."""

_AT_ONCE: Final = 2**26
"""Elements whose differences are in memory at once, if the device decides whether to update."""


class ParameterAverages:
    """Exponential moving averages of the parameters that an optimizer updates on this rank.

    Args:
        optimizer: The optimizer. The averages begin with its parameters.
        decay: The weight of the previous average in a step, between 0 and 1.

    Raises:
        OptimError: The decay is out of range, a state of the update rule has the suffix of
            averages, or main parameters are in host memory.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise OptimError(f"the decay of averages must lie between 0 and 1, got {decay}")
        if AVERAGE_SUFFIX in optimizer.state_names:
            raise OptimError(
                f"the update rule has a state named {AVERAGE_SUFFIX!r}, the suffix of averages of "
                "parameters; rename it"
            )
        if optimizer.main.hosted:
            raise OptimError(
                "averages of parameters do not work with main parameters in host memory, since "
                "they are on the device; leave out one of them"
            )
        self.decay = decay
        self._main = optimizer.main
        self._averages = {n: t.clone() for n, t in self._main.values()}
        self._in_model = False

    @property
    def tensors(self) -> Mapping[str, Float[Tensor, "..."]]:
        """The averages by global name, in the shapes of this rank's parameters or their shards."""
        if self._in_model:
            raise OptimError("the averages are in the model; leave in_model() first")
        return self._averages

    @torch.no_grad()
    def reset(self) -> None:
        """Begins again with the parameters, after weights without averages were loaded."""
        for name, value in self._main.values():
            self._averages[name].copy_(value)

    @torch.no_grad()
    def update(self, skipped: Bool[Tensor, ""]) -> None:
        """Moves the averages towards the parameters. Does not wait for a device.

        Args:
            skipped: Whether the optimizer skipped the step; then the averages stay as they are.
        """
        weight = 1.0 - self.decay
        if not skipped.is_cuda:
            if not bool(skipped):
                for averages, values in self._chunks():
                    torch._foreach_lerp_(averages, values, weight)
            return
        weight_on_device = torch.where(skipped, 0.0, weight)
        for averages, values in self._chunks():
            differences = torch._foreach_sub(values, averages)
            torch._foreach_mul_(differences, weight_on_device)
            torch._foreach_add_(averages, differences)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Makes the model compute with the averages in the block, rounded to its dtype.

        Parameters in the dtype of their averages change places with them. Others are copied.
        """
        kept = self._enter()
        self._in_model = True
        try:
            yield
        finally:
            self._in_model = False
            self._leave(kept)

    def views(self) -> dict[str, list[View]]:
        """Returns views of the averages for a checkpoint: ``PARAMETER.ema``."""
        return {f"{n}.{AVERAGE_SUFFIX}": v for n, v in self._main.views(self._averages).items()}

    def _chunks(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yields averages and values of several parameters."""
        averages, values, elements = list[Tensor](), list[Tensor](), 0
        for name, value in self._main.values():
            averages.append(self._averages[name])
            values.append(value)
            elements += value.numel()
            if elements >= _AT_ONCE:
                yield averages, values
                averages, values, elements = [], [], 0
        if averages:
            yield averages, values

    @torch.no_grad()
    def _enter(self) -> dict[str, Tensor]:
        """Returns the parameters that do not fit where the averages are."""
        self._main.wait()
        kept = {}
        for name, parameter in self._main.parameters.items():
            average, before = self._averages[name], parameter.detach().clone()
            parameter.copy_(average)
            if parameter.dtype == average.dtype:
                average.copy_(before)
            else:
                kept[name] = before
        self._main.publish()
        return kept

    @torch.no_grad()
    def _leave(self, kept: Mapping[str, Tensor]) -> None:
        """Restores the parameters."""
        self._main.wait()
        for name, parameter in self._main.parameters.items():
            if name in kept:
                parameter.copy_(kept[name])
                continue
            average = parameter.detach().clone()
            parameter.copy_(self._averages[name])
            self._averages[name].copy_(average)
        self._main.publish()
