"""The optimizer: gradient clipping, main parameters and state, common to all update rules."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from megatron_parallel import View
from megatron_parallel.data_parallel import Trainable
from torch import Tensor

from megatron_optim.clip import GradientNorm, clip_coefficient
from megatron_optim.config import OptimizerConfig
from megatron_optim.decision import StepResult, host_decides
from megatron_optim.distributed import ShardedMainParameters
from megatron_optim.errors import OptimError
from megatron_optim.loss_scale_config import LossScaleConfig
from megatron_optim.mixed_precision import MainParameters
from megatron_optim.offload_config import OffloadConfig
from megatron_optim.optimizer_state import OptimizerState, names_of_state
from megatron_optim.param_groups import (
    ParameterGroup,
    build_parameter_groups,
    require_distinct,
    require_matches,
)
from megatron_optim.row_factors import RowFactors
from megatron_optim.scaler import LossScaler
from megatron_optim.state_format_config import StateFormatConfig
from megatron_optim.update_rule import build_rules, check_state_formats
from megatron_optim.update_squares import UpdateSquares
from megatron_optim.updates import Updates
from megatron_optim.width import WidthRatio


class Optimizer:
    """An optimizer with an update rule, gradient clipping and weight-decay groups.

    The update rule is that of ``config.optimizer`` (`megatron_optim.UpdateRule`). If the norm of
    the gradient is NaN or infinite, every rank skips the step and counts it in ``skipped_steps``.
    On a CUDA device, the device itself decides whether to skip, and the host does not wait for it,
    if all update rules can do so (`UpdateRule.decides_on`).

    bf16 and fp16 parameters have fp32 main parameters, which hold the exact weights. Optimizer
    state is fp32, or float64 for float64 parameters, unless ``formats`` has other formats. Clipping
    may scale gradients in place.

    Args:
        trainable: The parameters of this rank, their sharding and their gradients
            (`megatron_parallel.TrainableParameters`, `megatron_parallel.TrainableChunks`).
            Parameters that do not require a gradient are left out. If the trainable has shards,
            only the shards of this rank are updated and have state (`megatron_optim.distributed`).
        config: The settings.
        widths: The ratios of inputs and outputs of parameters, by global name, over those in the
            model that the learning rate was chosen for (`megatron_optim.WidthRatio`). Parameters
            without an entry have the same sizes.
        loss_scale: The settings of the loss scale. The caller multiplies losses by
            ``scaler.scale`` before the backward pass; the optimizer divides the gradients by it.
            Defaults to no loss scale.
        formats: The formats of state and main parameters. Defaults to fp32.
        seed: Seed of stochastic rounding, where ``formats`` need it.
        offload: Which main parameters and state are in host memory, and are updated by the host.
            It waits once in each step. Defaults to none.

    Raises:
        OptimError: No parameter requires a gradient, a parameter has two names, its dtype cannot be
            trained, a pattern of names matches no parameter of any rank, a format cannot hold a
            state, state cannot be offloaded, or the update rule has no learning rates for other
            widths.

    Attributes:
        config: The settings.
        scaler: The loss scale; None without one.
        state_names: The names of the state tensors that the update rules have for a parameter.
    """

    def __init__(
        self,
        trainable: Trainable,
        config: OptimizerConfig,
        widths: Mapping[str, tuple[float, float]] | None = None,
        loss_scale: LossScaleConfig | None = None,
        formats: StateFormatConfig | None = None,
        seed: int = 0,
        offload: OffloadConfig | None = None,
    ) -> None:
        require_distinct(trainable)
        formats, offload = formats or StateFormatConfig(), offload or OffloadConfig()
        check_state_formats(config, formats)
        offload.check(config, formats, trainable.mesh.device.type)
        require_matches(config, trainable.parameters, trainable.mesh)
        self.config = config
        self.scaler = None if loss_scale is None else LossScaler(loss_scale, trainable.mesh.device)
        self._trainable = trainable
        # The numbers of updates and of skipped steps, counted where the decision is made.
        self._counts = torch.zeros(2, dtype=torch.int64, device=trainable.mesh.device)
        main_class = ShardedMainParameters if trainable.shards else MainParameters
        self._main = main_class(trainable, formats, seed, offload)
        rules = build_rules(config)
        self.state_names = names_of_state(rules)
        ratios = {name: WidthRatio(*sizes) for name, sizes in (widths or {}).items()}
        self._groups = build_parameter_groups(
            self._main.tensors, trainable, *rules, config.name_rules, ratios
        )
        self._host_decides = host_decides(trainable.mesh.device, self._groups)
        # Allocated here, so that a checkpoint can be loaded before the first step.
        self._state = OptimizerState(self._groups, self._main, formats)
        self._norm = GradientNorm(trainable.table, trainable.mesh)
        self._updates = Updates(
            self._groups, self._main, self._state, trainable.mesh.device, offload
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
        veto: Callable[[Tensor], Bool[Tensor, ""]] | None = None,
        squares: UpdateSquares | None = None,
        factors: RowFactors | None = None,
    ) -> StepResult:
        """Clips the gradients, reduced over the data axis, and updates every parameter once.

        Args:
            lr: The learning rate.
            weight_decay: The weight decay of parameters that have it. Defaults to the configured
                one.
            decoupled_lr: The learning rate of token embeddings and output matrices
                (`Sharding.vocabulary`). Defaults to ``lr``.
            losses: The losses of this step, equal on every rank. The step is skipped if one is not
                finite.
            veto: Returns from the norm of the gradient whether to skip the step although it is
                finite, equally on every rank. Defaults to None, with which no such step is skipped.
            squares: Measures the update (`megatron_optim.update_ratios`). Defaults to None.
            factors: Factors of rows of parameters, by global name; their dims are the first ones of
                the parameter. They are multiplied after the update, unless the step is skipped.
                Defaults to none.
        """
        self._state.forget_copies()
        self._main.step += 1
        self._state.squares = squares
        gradients = self.gradients()
        self._updates.take(gradients)
        terms, sharded = self._main.norm_terms(gradients)
        norm = self._norm(terms, sharded=sharded)
        losses, scale = list(losses), None if self.scaler is None else self.scaler.scale
        norm = norm if scale is None else norm / scale
        finite = torch.stack([norm, *losses]).isfinite().all() if losses else norm.isfinite()
        coefficient = clip_coefficient(norm, self.config.clip_grad)
        coefficient = torch.where(finite, coefficient, 1.0)
        factor = coefficient if scale is None else coefficient / scale
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        rates = lr, decoupled_lr, decay
        vetoed = None if veto is None else veto(norm) & finite
        updates = finite if vetoed is None else finite & ~vetoed
        ones = {name: torch.where(updates, each, 1.0) for name, each in (factors or {}).items()}
        self._updates.scale(ones)
        if self._host_decides:
            self._updates.read(gradients, factor, updates, self._counts[0], rates)
        else:
            divided = factor if self.config.clip_grad or scale is not None else None
            self._updates.unread(gradients, factor, updates, self._counts[0], rates, divided)
        self._counts += torch.stack([updates, ~updates])
        if self.scaler is None:
            return StepResult(norm, coefficient, ~updates, vetoed=vetoed)
        self.scaler.update(~finite)
        sound = torch.stack(losses).isfinite().all() if losses else torch.ones_like(finite)
        return StepResult(norm, coefficient, ~updates, ~finite & sound, scale, vetoed)

    @property
    def main(self) -> MainParameters:
        """The main parameters of this rank."""
        return self._main

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """The groups of parameters of this rank, each updated by one call of a rule."""
        return self._groups

    @property
    def steps(self) -> int:
        """The number of updates. Waits for the device."""
        return int(self._counts[0])

    @property
    def skipped_steps(self) -> int:
        """The number of steps that updated nothing. Waits for the device."""
        return int(self._counts[1])

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
        The step counts are in `scalars`. Values in other formats are copied to fp32, so that a
        checkpoint does not depend on the formats. After loading, call `load_scalars`, which stores
        them.
        """
        return self._state.views()

    def state_tensors(self) -> list[Tensor]:
        """Returns the tensors of state and main parameters as they are stored."""
        return self._state.tensors()

    def scalars(self) -> dict[str, Any]:
        """Returns step counts and loss scale, plain values that are saved beside `views`.

        Waits for the device.
        """
        steps, skipped_steps = self._counts.tolist()
        scale = {} if self.scaler is None else self.scaler.scalars()
        return {"steps": steps, "skipped_steps": skipped_steps, **scale}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restores the values that `scalars` returned, after tensors were loaded into `views`.

        Raises:
            OptimError: A value is missing.
        """
        missing = self.scalars().keys() - scalars.keys()
        if missing:
            raise OptimError(f"the optimizer state in the checkpoint lacks {sorted(missing)}")
        counts = [int(scalars["steps"]), int(scalars["skipped_steps"])]
        self._counts.copy_(torch.tensor(counts))
        self._main.step = sum(counts)
        self._state.store_copies()
        self._main.copy_model_to_unsaved()
        if self.scaler is not None:
            self.scaler.load_scalars(scalars)
