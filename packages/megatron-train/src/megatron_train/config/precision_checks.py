"""Checks of settings that the precision of a run does not support."""

from megatron_models import check_low_precision
from megatron_optim import LossScaleConfig

from megatron_train.config.options import flags_of
from megatron_train.config.products import PLAIN
from megatron_train.config.run_sections import RunSections, named_by_flags
from megatron_train.errors import TrainError


def check_products_in_low_precision(run: RunSections) -> None:
    """Refuses products in few bits where other products or compiled code are asked for."""
    few = run.low_precision
    if not few.enabled:
        return
    flag = "--fp8-format" if few.fp4_format is None else "--fp4-format"
    if run.product != PLAIN:
        raise TrainError(
            f"{flag} and --linear-product {run.product} are both products of linear layers; "
            "leave out one of them"
        )
    if run.placement.batch_invariant_mode:
        raise TrainError(
            f"{flag} does not work with --batch-invariant-mode, since scales depend on all "
            "rows; leave out one of them"
        )
    if run.training.compile and flag == "--fp4-format":
        raise TrainError(
            "--compile does not work with --fp4-format, whose random rounding ends its graphs; "
            "leave out one of them"
        )
    with named_by_flags("low_precision"):
        check_low_precision(run.model, few)


def check_loss_scale(run: RunSections) -> None:
    """Refuses settings of the loss scale in a run that has none."""
    if run.training.fp16:
        return
    plain = LossScaleConfig()
    for name, flag in flags_of(LossScaleConfig).items():
        if getattr(run.loss_scale, name) != getattr(plain, name):
            raise TrainError(
                f"{flag} has no effect without --fp16: the loss of other precisions is not "
                "scaled; leave it out"
            )


def check_formats_of_state(run: RunSections) -> None:
    """Refuses a format of main parameters that does not fit the precision of the weights."""
    with named_by_flags("state_formats"):
        run.state_formats.require_main_format(run.training.precision)


def check_offload(run: RunSections) -> None:
    """Refuses averages and scaled rows of weights whose main weights are in host memory."""
    if run.offload.optimizer_cpu_offload and run.qk_clip.qk_clip:
        raise TrainError(
            "--qk-clip does not work with --optimizer-cpu-offload, since it scales main "
            "weights on the device; leave out one of them"
        )
    if run.offload.optimizer_cpu_offload and run.averages.ema_decay is not None:
        raise TrainError(
            "--ema-decay does not work with --optimizer-cpu-offload, since averages are on the "
            "device; leave out one of them"
        )
