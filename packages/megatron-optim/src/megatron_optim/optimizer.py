"""The optimizer: what is the same whatever rule updates the parameters."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from megatron_parallel import View
from megatron_parallel.data_parallel import Trainable
from torch import Tensor

from megatron_optim.clip import clip_coefficient, gradient_norm, scale_gradients
from megatron_optim.config import OptimizerConfig
from megatron_optim.distributed import ShardedMainParameters
from megatron_optim.errors import OptimError
from megatron_optim.mixed_precision import MainParameters
from megatron_optim.param_groups import ParameterGroup, build_parameter_groups
from megatron_optim.update_rule import MAIN_SUFFIX, build_rules


class StepResult(NamedTuple):
    """What one optimizer step did; tensors are scalars on the mesh's device."""

    grad_norm: Float64[Tensor, ""]
    """Norm of the whole gradient before clipping."""
    clip_coefficient: Float64[Tensor, ""]
    """What the gradient was multiplied by; 1 where it was not clipped."""
    skipped: bool
    """Whether parameters and state were left alone because a number was not finite."""


class Optimizer:
    """An update rule with gradient clipping and weight-decay groups.

    The rule is that of ``config.optimizer`` (`megatron_optim.UpdateRule`).

    A gradient whose norm is NaN or infinite is not applied: the step is skipped, on every rank
    alike, and counted in ``skipped_steps``.

    bf16 parameters have fp32 main parameters, which hold the exact weights; optimizer state is fp32
    (float64 for float64 parameters). Clipping scales gradients in place.

    Args:
        trainable: this rank's parameters, how they are cut, and their gradients
            (`megatron_parallel.TrainableParameters`, `megatron_parallel.TrainableChunks`).
            Parameters that do not require a gradient are left out. If it has shards, only this
            rank's part of the parameters is updated and has state (`megatron_optim.distributed`).
        config: settings.

    Raises:
        OptimError: no parameter requires a gradient, one has two names, or a dtype that cannot be
            trained.

    Attributes:
        config: its settings.
        state_names: names of the state tensors that its rules keep for a parameter.
        steps: updates that were made.
        skipped_steps: those that were not, because of a gradient that was not finite.
    """

    def __init__(self, trainable: Trainable, config: OptimizerConfig) -> None:
        _require_distinct(trainable)
        self.config = config
        self.steps = 0
        self.skipped_steps = 0
        self._trainable = trainable
        kind = ShardedMainParameters if trainable.shards else MainParameters
        self._main = kind(trainable)
        tensors = self._main.tensors
        rules = build_rules(config)
        self.state_names = tuple(
            dict.fromkeys(state_tensor.name for rule in rules for state_tensor in rule.state)
        )
        self._groups = build_parameter_groups(tensors, trainable.table, trainable.mesh, *rules)
        # Allocated now, so that a checkpoint can be loaded before the first step.
        self._state: dict[str, dict[str, Tensor]] = {}
        for group in self._groups:
            for state_tensor in group.rule.state:
                self._state.setdefault(state_tensor.name, {}).update(
                    {n: torch.zeros_like(tensors[n], dtype=state_tensor.dtype) for n in group.names}
                )

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns the gradients that the next step will use, by global name, in main precision."""
        return self._main.gradients()

    def step(
        self,
        lr: float,
        weight_decay: float | None = None,
        decoupled_lr: float | None = None,
        *,
        losses: Iterable[Float64[Tensor, ""]] = (),
    ) -> StepResult:
        """Clips the gradient and update every parameter once.

        Gradients must have been reduced over the data axis; they are scaled in place where clipped.

        Args:
            lr: learning rate.
            weight_decay: of the parameters that take it. Defaults to the configured one.
            decoupled_lr: learning rate of token embeddings and output matrices
                (`Sharding.vocabulary`). Defaults to ``lr``.
            losses: of this step, equal on every rank. The step is skipped if one is not finite.
        """
        gradients = self.gradients()
        table, mesh = self._trainable.table, self._trainable.mesh
        norm = gradient_norm(gradients, table, mesh, sharded=self._main.sharded)
        factor = clip_coefficient(norm, self.config.clip_grad)
        # The only time that the host waits for the device: what follows depends on it.
        scale, *numbers = torch.stack([factor, norm, *losses]).tolist()
        if not all(map(math.isfinite, numbers)):
            self.skipped_steps += 1
            return StepResult(norm, torch.ones_like(norm), skipped=True)
        scale_gradients(gradients.values(), scale)
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        for group in self._groups:
            rate = lr if decoupled_lr is None or not group.decoupled else decoupled_lr
            self._update(group, gradients, rate, decay if group.decays else 0.0)
        self._main.copy_main_to_model()
        self.steps += 1
        return StepResult(norm, factor, skipped=False)

    @torch.no_grad()
    def _update(
        self, group: ParameterGroup, gradients: Mapping[str, Tensor], lr: float, weight_decay: float
    ) -> None:
        """Applies the group's rule to its parameters."""

        def held(tensors: Mapping[str, Tensor]) -> list[Tensor]:
            return [
                tensors[name].view(group.matrices[name]) if group.matrices else tensors[name]
                for name in group.names
            ]

        if group.matrices:  # autograd may have left them in another order of strides
            gradients = {name: gradients[name].contiguous() for name in group.names}
        group.rule.update(
            held(self._main.tensors),
            held(gradients),
            {
                state_tensor.name: held(self._state[state_tensor.name])
                for state_tensor in group.rule.state
            },
            lr=lr,
            weight_decay=weight_decay,
            step=self.steps + 1,
        )

    def zero_grad(self) -> None:
        """Drops all gradients, see `megatron_parallel.data_parallel.Trainable.zero`."""
        self._trainable.zero()

    def reload_model_parameters(self) -> None:
        """Takes the fp32 main parameters anew from the model.

        Needed after weights were loaded into a bf16 model without this optimizer's state, for
        example to fine-tune an imported checkpoint.
        """
        self._main.copy_model_to_main()

    def views(self) -> dict[str, list[View]]:
        """Returns views of all state tensors for a checkpoint, to save or to load into.

        A tensor is called after its parameter and the rule's name for it: ``NAME.exp_avg`` and
        ``NAME.exp_avg_sq`` of AdamW, ``NAME.momentum_buffer`` of SGD. Main parameters of bf16
        parameters are ``NAME.main``. The step counts are in `scalars`.
        """
        state = {**self._state, MAIN_SUFFIX: self._main.copies}
        return {
            f"{name}.{suffix}": views
            for suffix, tensors in state.items()
            for name, views in self._main.views(tensors).items()
        }

    def scalars(self) -> dict[str, Any]:
        """Returns the step counts, plain values that go into a checkpoint beside `views`."""
        return {"steps": self.steps, "skipped_steps": self.skipped_steps}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restores what `scalars` returned; the tensors are loaded into `views`."""
        missing = self.scalars().keys() - scalars.keys()
        if missing:
            raise OptimError(f"the optimizer state in the checkpoint lacks {sorted(missing)}")
        self.steps = int(scalars["steps"])
        self.skipped_steps = int(scalars["skipped_steps"])


def _require_distinct(trainable: Trainable) -> None:
    parameters = {n: p for n, p in trainable.parameters.items() if p.requires_grad}
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = names.setdefault(id(parameter), name)
        if other != name:
            raise OptimError(f"{other!r} and {name!r} are the same parameter; name it once")
    if not parameters and trainable.mesh.layout.pp == 1:  # a stage may be frozen
        raise OptimError("there is no parameter to optimize: none requires a gradient")
