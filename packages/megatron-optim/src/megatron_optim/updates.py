"""Calls update rules: on the device, and on the host for offloaded state."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_optim.clip import scale_gradients
from megatron_optim.decision import Decision, Rates, unread_step
from megatron_optim.errors import OptimError
from megatron_optim.mixed_precision import MainParameters, update_dtype
from megatron_optim.offload import HostUpdates
from megatron_optim.offload_config import OffloadConfig
from megatron_optim.optimizer_state import OptimizerState
from megatron_optim.param_groups import ParameterGroup
from megatron_optim.row_factors import RowFactors, scale_rows


class Updates:
    """Updates all groups of parameters.

    Args:
        groups: The groups.
        main: The main parameters.
        state: The state of the rules.
        device: The device of the model.
        offload: What the host updates.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        main: MainParameters,
        state: OptimizerState,
        device: torch.device,
        offload: OffloadConfig,
    ) -> None:
        self._groups, self._main, self._state = groups, main, state
        for group in groups:
            group.rule.prepare({name: main.tensors[name] for name in group.names})
        # A CPU rounds what is still in its caches; other devices round all in one kernel.
        self._rounds_early = device.type == "cpu"
        self._factors: RowFactors = {}
        self._host: HostUpdates | None = None
        if offload.optimizer_cpu_offload:
            overlap = offload.overlap_cpu_optimizer_d2h_h2d
            self._host = HostUpdates(groups, main, state, device, overlap=overlap)
            self._groups = self._host.device_groups
        self._divides = [
            device.type == "cpu" and group.rule.divides and self._in_single_precision(group)
            for group in self._groups
        ]

    def scale(self, factors: RowFactors) -> None:
        """Scales rows of parameters after the next update.

        Args:
            factors: Factors by name, which are 1 in a step that is skipped.

        Raises:
            OptimError: Main parameters are in host memory.
        """
        if factors and self._main.hosted:
            raise OptimError(
                "rows of parameters are scaled on the device, but main parameters are in host "
                "memory; leave out the factors or the offloading"
            )
        self._factors = factors

    def take(self, gradients: Mapping[str, Tensor]) -> None:
        """Starts copying the gradients that the host needs."""
        if self._host is not None:
            self._host.take(gradients)

    @torch.no_grad()
    def read(
        self,
        gradients: Mapping[str, Tensor],
        factor: Tensor,
        updates: Tensor,
        count: Tensor,
        rates: Rates,
    ) -> None:
        """Updates all groups if ``updates``, which the host reads.

        This is free on a CPU. Elsewhere it is the only wait for the device in a step.

        Args:
            gradients: The gradients by name.
            factor: The factor that clips and unscales them.
            updates: Whether the step updates anything.
            count: The number of updates before.
            rates: The rates of the step.
        """
        decision = Decision.read(factor, updates, count)
        if decision.updates:
            own = self._on_device(gradients)
            step = None
            if decision.factor != 1.0 and any(self._divides):
                step = unread_step((), factor, updates, count + 1)
            for group, divides in zip(self._groups, self._divides, strict=True):
                lr, decay = group.rates(*rates)
                for tensors in self._state.operands(group, own, rounds=self._rounds_early):
                    if step is not None and divides:
                        group.rule.update_unread(*tensors, lr=lr, weight_decay=decay, step=step)
                        continue
                    scale_gradients(tensors[1], decision.factor)
                    group.rule.update(*tensors, lr=lr, weight_decay=decay, step=decision.number)
        if self._host is not None:
            self._host.update(decision, rates, divides=decision.factor != 1.0, unread=False)
        if decision.updates:
            scale_rows(self._main, self._factors, rounds=self._rounds_early)
        if decision.updates and self._rounds_early:
            self._main.publish()
        elif decision.updates:
            self._main.copy_main_to_model()

    @torch.no_grad()
    def unread(
        self,
        gradients: Mapping[str, Tensor],
        factor: Tensor,
        updates: Tensor,
        count: Tensor,
        rates: Rates,
        divided: Tensor | None,
    ) -> None:
        """Updates all groups; the device skips the update unless ``updates``.

        If the host updates a part of them, it reads the decision before.

        Args:
            gradients: As for `read`.
            factor: As for `read`.
            updates: As for `read`.
            count: As for `read`.
            rates: As for `read`.
            divided: The factor if gradients have to be multiplied by it; otherwise None.
        """
        host, own = self._host, self._on_device(gradients)
        decision = None if host is None else Decision.read(factor, updates, count)
        numbers = unread_step(own.values(), divided, updates, count + 1)
        rounded: dict[str, Tensor] = {}
        for group in self._groups:
            lr, decay = group.rates(*rates)
            rounded |= (into := self._rounded_by_rule(group))
            step = replace(numbers, rounded=[into.get(n) for n in group.names]) if into else numbers
            for tensors in self._state.operands(group, own):
                group.rule.update_unread(*tensors, lr=lr, weight_decay=decay, step=step)
        if host is not None and decision is not None:
            host.update(decision, rates, divides=divided is not None, unread=True)
        scale_rows(self._main, self._factors, rounds=False)
        self._main.copy_main_to_model(rounded)

    def _rounded_by_rule(self, group: ParameterGroup) -> dict[str, Tensor]:
        """Returns what the rule of a group rounds its parameters into, by name.

        A rule rounds whole main parameters only. Rows that are scaled after the update are rounded
        after that.
        """
        if not (group.rule.rounds and self._state.passes_whole(group)):
            return {}
        into, names = self._main.rounded, (n for n in group.names if n not in self._factors)
        return {n: into[n] for n in names if n in into and into[n].is_contiguous()}

    def _in_single_precision(self, group: ParameterGroup) -> bool:
        """Returns whether float32 divisors are as precise as the updates of a group."""
        tensors = (self._main.tensors[name] for name in group.names)
        return all(update_dtype(tensor) == torch.float32 for tensor in tensors)

    def _on_device(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the gradients of the parameters that the device updates."""
        hosted = self._main.hosted
        return {n: g for n, g in gradients.items() if n not in hosted} if hosted else gradients
