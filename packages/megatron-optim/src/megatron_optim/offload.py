"""Optimizer state in host memory, and its updates by the host.

ZeRO-Offload (Ren et al. 2021) with the twin-flow ratio of ZeRO-Offload++: the largest tensors, up
to a fraction of the elements that a rank updates, have main parameters and state in host memory.
In a step the host

1. gets their gradients, whose copies follow the backward pass;
2. waits once, until it knows whether to update, and the factor of the gradients;
3. updates them with the same rule, while the device updates the others;
4. copies the new values, rounded to the dtype of the model, to the device.

The kernels of the next step follow these copies. A step that is skipped copies nothing back.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from megatron_parallel.side_stream import SideStream
from torch import Tensor

from megatron_optim.decision import Decision, Rates, unread_step
from megatron_optim.mixed_precision import MainParameters, host_like
from megatron_optim.optimizer_state import OptimizerState
from megatron_optim.param_groups import ParameterGroup

SLICE = 2**24
"""Elements after which a slice ends, if copies and updates overlap."""


class HostUpdates:
    """Updates the parameters of this rank whose state is in host memory.

    Args:
        groups: The groups of all parameters.
        main: The main parameters; those in ``main.hosted`` are updated here.
        state: The state.
        device: The device of the model.
        overlap: Whether gradients and weights are copied in slices on a stream of their own.

    Attributes:
        device_groups: The groups without the parameters that are updated here.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        main: MainParameters,
        state: OptimizerState,
        device: torch.device,
        *,
        overlap: bool,
    ) -> None:
        hosted = main.hosted
        self._main, self._state = main, state
        self._side = SideStream.of(device) if overlap else None
        self.device_groups = tuple(_within(groups, main.tensors.keys() - hosted.keys()))
        self._slices = [
            part
            for group in _within(groups, hosted.keys())
            for part in (_slices(group, hosted) if overlap else [group])
        ]
        self._gradients = {
            name: host_like(main.parameters[name], tensor.dtype, copied=True)
            for name, tensor in hosted.items()
        }
        self._copied: list[torch.cuda.Event] = []

    @torch.no_grad()
    def take(self, gradients: Mapping[str, Float[Tensor, "..."]]) -> None:
        """Starts copying gradients to the host, which have all work of the current stream."""
        self._copied.clear()
        with self._copying():
            for part in self._slices:
                for name in part.names:
                    self._gradients[name].copy_(gradients[name], non_blocking=True)
                if self._side is not None:
                    self._copied.append(self._side.mark())

    @torch.no_grad()
    def update(self, decision: Decision, rates: Rates, *, divides: bool, unread: bool) -> None:
        """Updates the parameters on the host, and copies them to the device.

        Args:
            decision: What the device has decided.
            rates: The rates of the step.
            divides: Whether the gradients have to be multiplied by the factor.
            unread: Whether the device updates its parameters with `UpdateRule.update_unread`. A
                rule that can do so on the host does, too, with the same rounding.
        """
        for number, part in enumerate(self._slices if decision.updates else ()):
            if self._copied:
                self._copied[number].synchronize()
            self._update(part, decision, rates, divides, unread)
            with self._copying():
                for name in part.names:
                    self._give(name)
        if self._side is not None:
            self._side.join()

    def _update(
        self, part: ParameterGroup, decision: Decision, rates: Rates, divides: bool, unread: bool
    ) -> None:
        """Updates one slice on the host."""
        lr, decay = part.rates(*rates)
        gradients = {name: self._gradients[name] for name in part.names}
        factor = torch.tensor(decision.factor, dtype=torch.float64) if divides else None
        if unread and "cpu" in part.rule.decides_on:
            updates, number = torch.tensor(True), torch.tensor(decision.number)
            step = unread_step(gradients.values(), factor, updates, number)
            for tensors in self._state.operands(part, gradients):
                part.rule.update_unread(*tensors, lr=lr, weight_decay=decay, step=step)
            return
        if factor is not None:
            torch._foreach_mul_(list(gradients.values()), decision.factor)
        for tensors in self._state.operands(part, gradients):
            part.rule.update(*tensors, lr=lr, weight_decay=decay, step=decision.number)

    def _give(self, name: str) -> None:
        """Starts copying a main parameter to the device, rounded on the host."""
        values, parameter = self._main.hosted[name], self._main.parameters[name]
        if values.dtype != parameter.dtype:  # the memory of the gradient is free until the next
            room = self._gradients[name].view(-1).view(parameter.dtype)[: values.numel()]
            values = room.view(values.shape)
            self._main.round_hosted(name, values)
        parameter.copy_(values, non_blocking=True)

    def _copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else self._side.running()


def _within(groups: Iterable[ParameterGroup], names: Iterable[str]) -> list[ParameterGroup]:
    """Returns groups with these names alone, in order, without empty groups."""
    kept = set(names)
    parts = [g._replace(names=tuple(n for n in g.names if n in kept)) for g in groups]
    return [part for part in parts if part.names]


def _slices(group: ParameterGroup, tensors: Mapping[str, Tensor]) -> list[ParameterGroup]:
    """Returns the parts of a group, each of which ends once it has `SLICE` elements."""
    found, names, elements = list[ParameterGroup](), list[str](), 0
    for name in group.names:
        names.append(name)
        elements += tensors[name].numel()
        if elements >= SLICE:
            found.append(group._replace(names=tuple(names)))
            names, elements = [], 0
    return [*found, group._replace(names=tuple(names))] if names else found
