"""The update rules that torch has as well: Adam, and SGD with momentum.

Both call torch's fused kernels on CPUs and CUDA devices, and its functional optimizers elsewhere.
The optimizer classes would import the whole compiler when they are constructed. On request, Adam
calls our own kernel (`megatron_optim.triton_adam`), or those of another library
(`megatron_optim.multi_tensor`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self, cast

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from megatron_optim.config import OptimizerConfig
from megatron_optim.multi_tensor import AdamKernel, check_tensors, load_kernel
from megatron_optim.rule_settings import AdamSettings
from megatron_optim.update_rule import StateTensor, UnreadStep, UpdateRule
from megatron_optim.width import WidthRatio

FUSED_DEVICES = ("cpu", "cuda")
DECIDING_DEVICES = ("cuda", "cpu")
"""Devices whose fused implementations skip a step by themselves; the host for offloaded state."""


class Adam(UpdateRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): ``--optimizer adam``.

    Settings are ``adam_beta1``, ``adam_beta2`` and ``adam_eps``. Without
    ``AdamSettings.decoupled_weight_decay``, weight decay is part of the gradient, as in the first
    version of Adam (Kingma and Ba 2015) with L2 regularization.

    Attributes:
        kernel_devices: The types of devices of kernels that torch does not have. Triton's
            interpreter also runs on a CPU: a subclass that names it tests the kernel.
    """

    decides_on = DECIDING_DEVICES
    divides = True
    kernel_devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self._kernel: AdamKernel | None = None
        self.state = (
            StateTensor("exp_avg", decay=config.adam_beta1),
            StateTensor("exp_avg_sq", decay=config.adam_beta2, positive=True),
        )

    @property
    def _decoupled(self) -> bool:
        return cast(AdamSettings, self.config.settings).decoupled_weight_decay

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the kernels that ``AdamSettings.kernels`` names, if they are not those of torch.

        Raises:
            OptimError: The library is missing, or its kernels cannot update a parameter.
        """
        library = cast(AdamSettings, self.config.settings).kernels
        if library != "torch":
            check_tensors(library, tensors, self.kernel_devices)
            self._kernel = self._kernel or load_kernel(library)
            self.rounds = self._kernel.rounds

    def for_width(self, width: WidthRatio) -> tuple[Self, float]:
        """Divides learning rate and ``adam_eps`` by the ratio of the inputs, as Megatron-LM does.

        Gradients of a matrix shrink with its width, so that epsilon must too. Weight decay is part
        of the update and is divided likewise.
        """
        config = replace(self.config, adam_eps=self.config.adam_eps / width.inputs)
        return type(self)(config), 1 / width.inputs

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Updates the parameters and both moments."""
        if self._kernel is not None:
            self._kernel.update(
                [gradients, parameters, state["exp_avg"], state["exp_avg_sq"]],
                lr=lr,
                betas=(self.config.adam_beta1, self.config.adam_beta2),
                eps=self.config.adam_eps,
                step=step,
                decoupled=self._decoupled,
                weight_decay=weight_decay,
            )
            return
        if _fused(parameters):
            number = torch.tensor(float(step), device=parameters[0].device)
            self._fused(parameters, gradients, state, number, lr, weight_decay)
            return
        adam(
            list(parameters),
            list(gradients),
            exp_avgs=list(state["exp_avg"]),
            exp_avg_sqs=list(state["exp_avg_sq"]),
            max_exp_avg_sqs=[],
            state_steps=list(torch.full((len(parameters),), step - 1.0).unbind()),
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            maximize=False,
            decoupled_weight_decay=self._decoupled,
        )

    def update_unread(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: UnreadStep,
    ) -> None:
        """Updates the parameters and both moments, unless the device skips the step."""
        if self._kernel is not None:
            self._kernel.update_unread(
                [gradients, parameters, state["exp_avg"], state["exp_avg_sq"]],
                lr=lr,
                betas=(self.config.adam_beta1, self.config.adam_beta2),
                eps=self.config.adam_eps,
                step=step,
                decoupled=self._decoupled,
                weight_decay=weight_decay,
            )
            return
        number, divisor, skip = step.number, step.divisor, step.skip
        self._fused(parameters, gradients, state, number, lr, weight_decay, divisor, skip)

    def _fused(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        number: Tensor,
        lr: float,
        weight_decay: float,
        divisor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Calls the kernel of torch's fused Adam with one number of the update for all tensors.

        ``torch.optim.adam.adam`` needs a number for each tensor, which costs an operation for each
        of them.
        """
        kernel = torch._fused_adamw_ if self._decoupled else torch._fused_adam_
        kernel(
            list(parameters),
            list(gradients),
            list(state["exp_avg"]),
            list(state["exp_avg_sq"]),
            [],
            [number] * len(parameters),
            lr=lr,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=skip,
        )


class SGD(UpdateRule):
    """Stochastic gradient descent with momentum: ``--optimizer sgd``.

    With gradient ``g``, weight decay ``w`` and momentum ``m``: ``d = g + w * parameter``, ``buffer
    = m * buffer + d``, ``parameter -= lr * buffer``, as in ``torch.optim.SGD`` and Megatron-LM.
    Unlike in AdamW, weight decay is part of the gradient. The setting is ``sgd_momentum``. Without
    momentum there is no state.
    """

    decides_on = DECIDING_DEVICES
    divides = True

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.state = (StateTensor("momentum_buffer"),) if config.sgd_momentum else ()

    def for_width(self, width: WidthRatio) -> tuple[Self, float]:
        """Multiplies the learning rate by the ratio of the outputs over that of the inputs."""
        return self, width.outputs / width.inputs

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Updates the parameters and the momentum buffer."""
        del step
        self._sgd(parameters, gradients, state, _fused(parameters), lr, weight_decay)

    def update_unread(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: UnreadStep,
    ) -> None:
        """Updates the parameters and the momentum buffer, unless the device skips the step."""
        self._sgd(parameters, gradients, state, True, lr, weight_decay, step)

    def _sgd(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        fused: bool,
        lr: float,
        weight_decay: float,
        unread: UnreadStep | None = None,
    ) -> None:
        buffers: list[Tensor | None] = [None] * len(parameters)
        if self.state:
            buffers = [*state["momentum_buffer"]]
        sgd(
            list(parameters),
            list(gradients),
            buffers,
            fused=fused,
            grad_scale=None if unread is None else unread.divisor,
            found_inf=None if unread is None else unread.skip,
            weight_decay=weight_decay,
            momentum=self.config.sgd_momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def _fused(parameters: Sequence[Tensor]) -> bool:
    return all(tensor.device.type in FUSED_DEVICES for tensor in parameters)
