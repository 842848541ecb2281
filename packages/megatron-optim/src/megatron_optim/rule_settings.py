"""Settings that only one of the element-wise rules has. This module does not import torch."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_optim.errors import OptimError

AdamKernels = Literal["torch", "triton", "apex", "transformer-engine"]


@dataclass(frozen=True)
class AdamSettings:
    """Settings of Adam. Its decay rates and epsilon are in `megatron_optim.OptimizerConfig`."""

    decoupled_weight_decay: bool = field(
        default=True,
        metadata={
            "flag": "--no-decoupled-weight-decay",
            "help": "add the weight decay to the gradient (L2 regularization) instead of "
            "subtracting it from the parameter as AdamW does (our name)",
        },
    )
    kernels: AdamKernels = field(
        default="torch",
        metadata={
            "flag": "--adam-kernels",
            "help": "fused kernels that update parameters on GPUs: those of torch, our own, which "
            "also round into the weights (triton), or those of a library; all but torch's were "
            "never run on a GPU by this project (our name)",
            "choices": get_args(AdamKernels),
        },
    )


@dataclass(frozen=True)
class LionSettings:
    """Settings of Lion, with the defaults of Megatron-LM, which are those for language models."""

    beta1: float = field(
        default=0.95,
        metadata={
            "flag": "--lion-beta1",
            "help": "weight of the running mean in the update; the rest is the gradient's",
        },
    )
    beta2: float = field(
        default=0.98,
        metadata={
            "flag": "--lion-beta2",
            "help": "decay rate of the running mean of the gradient",
        },
    )

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OptimError(
                    f"{{{name}:name}} must lie in [0, 1), got {{{name}:repr}}", vars(self)
                )
