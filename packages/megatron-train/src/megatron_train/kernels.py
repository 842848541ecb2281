"""The backends of a run on this machine."""

import torch
from megatron_kernels import BackendChoice
from megatron_models import ConfigError, describe_low_precision, explain_backends

from megatron_train.config.kernel_backends import chosen_backends
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError


def explain_run_backends(
    config: RunConfig, device: torch.device, dtype: torch.dtype
) -> tuple[BackendChoice, ...]:
    """Returns the backend of each operation of the model, and why.

    Returns nothing on a CPU if none is requested.

    Args:
        config: The run.
        device: Device of the model.
        dtype: Dtype of the model.

    Raises:
        TrainError: A requested backend cannot run on this machine; the message has the reason.
    """
    chosen = chosen_backends(config)
    if not chosen and device.type == "cpu":
        return ()
    try:
        return explain_backends(
            config.model, chosen, device=device, dtype=dtype, compiled=config.training.compile
        )
    except ConfigError as error:
        raise TrainError(f"{_flag(config)}: {error}; leave it out") from None


def describe_products(config: RunConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Returns in one line how linear layers multiply in few bits; empty if they do not.

    Args:
        config: The run.
        device: Device of the model.
        dtype: Dtype of the model.

    Raises:
        TrainError: Transformer Engine is to do so and does not support the recipe here.
    """
    few = config.low_precision
    try:
        return describe_low_precision(few, device, dtype, chosen_backends(config))
    except ConfigError as error:
        flag = "--fp8-recipe" if few.fp4_format is None else "--fp4-recipe"
        raise TrainError(f"{flag}: {error}; choose another recipe or device") from None


def _flag(config: RunConfig) -> str:
    """Returns the flags that request backends."""
    placement = config.placement
    given = {
        "--kernel-backends": placement.kernel_backends,
        "--attention-backend": placement.attention_backend != "auto",
        "--transformer-impl": placement.transformer_impl != "local",
    }
    return " or ".join(flag for flag, value in given.items() if value)
