"""Check of the minimum time of one step, before anything is built.

A sequence that fits into memory may still take years, since the cost of attention grows with the
square of its length. Before the first step ends, nothing is printed or saved.
"""

from dataclasses import dataclass

from megatron_models import training_flops

from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.metrics.peak import Peak

MAX_STEP_SECONDS = 24 * 3600.0
"""Maximum seconds of a step at the device's peak rate. Longer steps are refused."""
WARN_STEP_SECONDS = 60.0
"""Seconds of a step above which a warning is printed."""


@dataclass(frozen=True)
class StepWork:
    """The floating-point operations of one step.

    Attributes:
        flops: Operations of forward and backward passes on each rank.
        attention: Fraction of them that grows with the square of the sequence length, 0 to 1.
    """

    flops: float
    attention: float


def minimum_work(config: RunConfig) -> StepWork:
    """Returns the minimum work of each rank in the largest step of a run.

    If documents do not attend to one another (--reset-attention-mask, or a pool of ranks),
    attention is not counted, since their lengths are unknown.
    """
    length, samples = config.data.seq_length, max(config.batch_sizes.sizes)
    tokens = samples * length
    packed = config.data.reset_attention_mask or config.layout.hybrid_cp
    without = training_flops(config.model, length, tokens, squared_lengths=0)
    flops = without if packed else training_flops(config.model, length, tokens)
    return StepWork(flops / config.layout.world_size, 1 - without / flops)


def check_step_time(config: RunConfig, rate: Peak | None) -> str | None:
    """Returns a warning about the time of a step; None if a step is short or its time is unknown.

    Args:
        config: The run.
        rate: Peak rate of a rank's device; None if unknown.

    Raises:
        TrainError: A step takes more than a day; the message has the remedy.
    """
    if rate is None:
        return None
    work = minimum_work(config)
    seconds = work.flops / rate.flops_per_second
    if seconds <= WARN_STEP_SECONDS:
        return None
    samples = max(config.batch_sizes.sizes)
    text = (
        f"a step of {samples} sample{'s' * (samples > 1)} with --seq-length "
        f"{config.data.seq_length} takes at least {_duration(seconds)}: {work.flops:.4g} "
        f"floating-point operations on each rank, {100 * work.attention:.0f} % of them attention, "
        f"at {rate.flops_per_second:.4g} FLOP/s ({rate.source})"
    )
    if seconds <= MAX_STEP_SECONDS:
        return f"{text}; nothing is printed and no checkpoint is saved before it ends"
    lower = "--seq-length" if work.attention > 0.5 else "--global-batch-size"
    raise TrainError(
        f"{text}; the maximum is {_duration(MAX_STEP_SECONDS)}: lower {lower} or the size of the "
        "model, or start more ranks"
    )


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds / 60:.1f} minutes"
