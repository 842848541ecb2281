"""The optimizer: gradient clipping, main parameters and state, common to all update rules."""

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
from megatron_optim.width import WidthRatio


class StepResult(NamedTuple):
    """The result of one optimizer step. Tensors are scalars on the device of the mesh."""

    grad_norm: Float64[Tensor, ""]
    """The norm of the whole gradient before clipping."""
    clip_coefficient: Float64[Tensor, ""]
    """The factor that the gradient was multiplied by; 1 if it was not clipped."""
    skipped: bool
    """Whether the step was skipped because a number was not finite."""


class Optimizer:
    """An optimizer with an update rule, gradient clipping and weight-decay groups.

    The update rule is that of ``config.optimizer`` (`megatron_optim.UpdateRule`). If the norm of
    the gradient is NaN or infinite, every rank skips the step and counts it in ``skipped_steps``.

    bf16 parameters have fp32 main parameters, which hold the exact weights. Optimizer state is
    fp32, or float64 for float64 parameters. Clipping scales gradients in place.

    Args:
        trainable: The parameters of this rank, their sharding and their gradients
            (`megatron_parallel.TrainableParameters`, `megatron_parallel.TrainableChunks`).
            Parameters that do not require a gradient are left out. If the trainable has shards,
            only the shards of this rank are updated and have state (`megatron_optim.distributed`).
        config: The settings.
        widths: The ratios of inputs and outputs of parameters, by global name, over those in the
            model that the learning rate was chosen for (`megatron_optim.WidthRatio`). Parameters
            without an entry have the same sizes.

    Raises:
        OptimError: No parameter requires a gradient, a parameter has two names, its dtype cannot be
            trained, or the update rule has no learning rates for other widths.

    Attributes:
        config: The settings.
        state_names: The names of the state tensors that the update rules have for a parameter.
        steps: The number of updates.
        skipped_steps: The number of steps skipped because a gradient was not finite.
    """

    def __init__(
        self,
        trainable: Trainable,
        config: OptimizerConfig,
        widths: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        _require_distinct(trainable)
        self.config = config
        self.steps = 0
        self.skipped_steps = 0
        self._trainable = trainable
        main_class = ShardedMainParameters if trainable.shards else MainParameters
        self._main = main_class(trainable)
        tensors = self._main.tensors
        rules = build_rules(config)
        self.state_names = tuple(
            dict.fromkeys(state_tensor.name for rule in rules for state_tensor in rule.state)
        )
        ratios = {name: WidthRatio(*sizes) for name, sizes in (widths or {}).items()}
        self._groups = build_parameter_groups(
            tensors, trainable.table, trainable.mesh, *rules, ratios
        )
        # Allocated here, so that a checkpoint can be loaded before the first step.
        self._state: dict[str, dict[str, Tensor]] = {}
        for group in self._groups:
            for state_tensor in group.rule.state:
                self._state.setdefault(state_tensor.name, {}).update(
                    {n: torch.zeros_like(tensors[n], dtype=state_tensor.dtype) for n in group.names}
                )

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns the gradients for the next step by global name, in the main dtype."""
        return self._main.gradients()

    def step(
        self,
        lr: float,
        weight_decay: float | None = None,
        decoupled_lr: float | None = None,
        *,
        losses: Iterable[Float64[Tensor, ""]] = (),
    ) -> StepResult:
        """Clips the gradients and updates every parameter once.

        Gradients must be reduced over the data axis. They are scaled in place if they are clipped.

        Args:
            lr: The learning rate.
            weight_decay: The weight decay of parameters that have it. Defaults to the configured
                one.
            decoupled_lr: The learning rate of token embeddings and output matrices
                (`Sharding.vocabulary`). Defaults to ``lr``.
            losses: The losses of this step, equal on every rank. The step is skipped if one is not
                finite.
        """
        gradients = self.gradients()
        table, mesh = self._trainable.table, self._trainable.mesh
        norm = gradient_norm(gradients, table, mesh, sharded=self._main.sharded)
        factor = clip_coefficient(norm, self.config.clip_grad)
        # The only wait for the device in this function: what follows depends on these numbers.
        scale, *numbers = torch.stack([factor, norm, *losses]).tolist()
        if not all(map(math.isfinite, numbers)):
            self.skipped_steps += 1
            return StepResult(norm, torch.ones_like(norm), skipped=True)
        scale_gradients(gradients.values(), scale)
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        for group in self._groups:
            rate = group.learning_rate(lr, decoupled_lr)
            self._update(group, gradients, rate, decay if group.decays else 0.0)
        self._main.copy_main_to_model()
        self.steps += 1
        return StepResult(norm, factor, skipped=False)

    @torch.no_grad()
    def _update(
        self, group: ParameterGroup, gradients: Mapping[str, Tensor], lr: float, weight_decay: float
    ) -> None:
        """Applies the rule of a group to its parameters."""

        def select(tensors: Mapping[str, Tensor]) -> list[Tensor]:
            return [
                tensors[name].view(group.matrices[name]) if group.matrices else tensors[name]
                for name in group.names
            ]

        if group.matrices:  # autograd may return gradients with other strides
            gradients = {name: gradients[name].contiguous() for name in group.names}
        group.rule.update(
            select(self._main.tensors),
            select(gradients),
            {
                state_tensor.name: select(self._state[state_tensor.name])
                for state_tensor in group.rule.state
            },
            lr=lr,
            weight_decay=weight_decay,
            step=self.steps + 1,
        )

    def zero_grad(self) -> None:
        """Drops all gradients; see `megatron_parallel.data_parallel.Trainable.zero`."""
        self._trainable.zero()

    def reload_model_parameters(self) -> None:
        """Copies the parameters of the model to the fp32 main parameters.

        Call it after loading weights without optimizer state into a bf16 model, for example to
        fine-tune an imported checkpoint.
        """
        self._main.copy_model_to_main()

    def views(self) -> dict[str, list[View]]:
        """Returns views of all state tensors, to save or load a checkpoint.

        A tensor is named ``PARAMETER.STATE``: ``NAME.exp_avg`` and ``NAME.exp_avg_sq`` for AdamW,
        ``NAME.momentum_buffer`` for SGD, and ``NAME.main`` for main parameters of bf16 parameters.
        The step counts are in `scalars`.
        """
        state = {**self._state, MAIN_SUFFIX: self._main.copies}
        return {
            f"{name}.{suffix}": views
            for suffix, tensors in state.items()
            for name, views in self._main.views(tensors).items()
        }

    def scalars(self) -> dict[str, Any]:
        """Returns the step counts, plain values that are saved beside `views`."""
        return {"steps": self.steps, "skipped_steps": self.skipped_steps}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restores the values that `scalars` returned. Tensors are loaded into `views`.

        Raises:
            OptimError: A value is missing.
        """
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
    if not parameters and trainable.mesh.layout.pp == 1:  # a whole stage may be frozen
        raise OptimError("there is no parameter to optimize: none requires a gradient")
