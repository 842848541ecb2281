"""AdamW for sharded parameters in fp32, float64 or bf16."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from megatron_parallel import Mesh, Sharding, Shards, View
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from megatron_optim.clip import clip_coefficient, gradient_norm, scale_gradients
from megatron_optim.config import OptimizerConfig
from megatron_optim.distributed import ShardedMainParameters
from megatron_optim.errors import OptimError
from megatron_optim.mixed_precision import Gradients, MainParameters
from megatron_optim.param_groups import decay_groups

FUSED_DEVICES = ("cpu", "cuda")
MOMENTS = ("exp_avg", "exp_avg_sq")


class StepResult(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float
    """Norm of the whole gradient before clipping; not finite if the step was skipped."""
    clip_coefficient: float
    """What the gradient was multiplied by; 1 where it was not clipped."""
    skipped: bool
    """Whether parameters and state were left alone because the norm was not finite."""


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) with gradient clipping and weight-decay groups.

    ``named_parameters`` maps global names to this rank's parameters, each of them once (a tied
    weight has one name); those that do not require a gradient are left out. ``table`` and ``mesh``
    say how they are cut. A gradient whose norm is NaN or infinite is not applied: the step is
    skipped, on every rank alike, and counted in ``skipped_steps``.

    bf16 parameters have fp32 main parameters, which hold the exact weights; optimizer state is fp32
    (float64 for float64 parameters).

    Gradients are those on the parameters, unless ``gradients`` is given: it is called once a step
    and returns them by name, summed over the data axis and in main precision, as
    ``megatron_parallel.GradientBuffers.gradients`` does. Clipping scales them in place.

    With ``shards``, those of all stages of this rank, it updates and keeps state for this rank's
    part of the parameters only (`megatron_optim.distributed`), and ``gradients`` returns parts too.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, Parameter] | Iterable[tuple[str, Parameter]],
        table: Mapping[str, Sharding],
        mesh: Mesh,
        config: OptimizerConfig,
        *,
        gradients: Gradients | None = None,
        shards: Sequence[Shards] = (),
    ) -> None:
        trainable = {n: p for n, p in dict(named_parameters).items() if p.requires_grad}
        _require_distinct(trainable)
        self.config = config
        self.steps = 0
        self.skipped_steps = 0
        self._table = table
        self._mesh = mesh
        self._main = (
            ShardedMainParameters(shards, gradients)
            if shards
            else MainParameters(trainable, gradients)
        )
        tensors = self._main.tensors
        self._decaying, self._others = decay_groups(tensors, table)
        self._fused = all(tensor.device.type in FUSED_DEVICES for tensor in tensors.values())
        # Allocated now, so that a checkpoint can be loaded before the first step.
        self._moments = {
            moment: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            for moment in MOMENTS
        }
        self._counts = {
            name: torch.zeros((), device=tensor.device if self._fused else "cpu")
            for name, tensor in tensors.items()
        }

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Return the gradients that the next step will use, by global name, in main precision."""
        return self._main.gradients()

    def step(self, lr: float, weight_decay: float | None = None) -> StepResult:
        """Clip the gradient and update every parameter once.

        ``weight_decay`` (default: the configured one) applies to the parameters that take it.
        Gradients must have been reduced over the data axis; they are scaled in place where clipped.
        """
        gradients = self.gradients()
        norm = gradient_norm(gradients, self._table, self._mesh, sharded=self._main.sharded)
        if not math.isfinite(norm):
            self.skipped_steps += 1
            return StepResult(norm, 1.0, skipped=True)
        factor = clip_coefficient(norm, self.config.clip_grad)
        scale_gradients(gradients.values(), factor)
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        self._update(self._decaying, gradients, lr, decay)
        self._update(self._others, gradients, lr, 0.0)
        self._main.publish()
        self.steps += 1
        return StepResult(norm, factor, skipped=False)

    @torch.no_grad()
    def _update(
        self, names: Sequence[str], gradients: Mapping[str, Tensor], lr: float, decay: float
    ) -> None:
        """Apply AdamW to the parameters of these names.

        torch's function and not its class, which imports the whole compiler when it is made.
        """
        if not names:
            return
        adamw(
            [self._main.tensors[name] for name in names],
            [gradients[name] for name in names],
            exp_avgs=[self._moments["exp_avg"][name] for name in names],
            exp_avg_sqs=[self._moments["exp_avg_sq"][name] for name in names],
            max_exp_avg_sqs=[],
            state_steps=[self._counts[name] for name in names],
            fused=self._fused,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.config.adam_eps,
            maximize=False,
        )

    def zero_grad(self) -> None:
        """Drop all gradients; those that were handed in are for their holder to drop."""
        self._main.zero_grad()

    def refresh_main_parameters(self) -> None:
        """Take the fp32 main parameters anew from the model.

        Needed after weights were loaded into a bf16 model without this optimizer's state, for
        example to fine-tune an imported checkpoint.
        """
        self._main.refresh()

    def views(self) -> dict[str, list[View]]:
        """Return views of all state tensors for a checkpoint, to save or to load into.

        A tensor is called after its parameter: ``NAME.exp_avg``, ``NAME.exp_avg_sq`` and, for bf16
        parameters, ``NAME.main``. The step counts are in `scalars`.
        """
        state = {**self._moments, "main": self._main.copies}
        return {
            f"{name}.{suffix}": views
            for suffix, tensors in state.items()
            for name, views in self._main.views(tensors, self._table, self._mesh).items()
        }

    def scalars(self) -> dict[str, Any]:
        """Return the step counts, plain values that go into a checkpoint beside `views`."""
        return {"steps": self.steps, "skipped_steps": self.skipped_steps}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore what `scalars` returned; the tensors are loaded into `views`."""
        missing = self.scalars().keys() - scalars.keys()
        if missing:
            raise OptimError(f"the optimizer state in the checkpoint lacks {sorted(missing)}")
        self.steps = int(scalars["steps"])
        self.skipped_steps = int(scalars["skipped_steps"])
        for count in self._counts.values():
            count.fill_(self.steps)


def _require_distinct(parameters: Mapping[str, Parameter]) -> None:
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = names.setdefault(id(parameter), name)
        if other != name:
            raise OptimError(f"{other!r} and {name!r} are the same parameter; name it once")
    if not parameters:
        raise OptimError("there is no parameter to optimize: none requires a gradient")
