"""Learning rate and weight decay as functions of the number of consumed samples.

Both schedules are plain functions of one number, so they have no state to save or restore. A run
that is resumed or changes its batch size evaluates them at the number of samples consumed. The
formulas are those of Megatron-LM's ``OptimizerParamScheduler``, in the same order of operations, so
the values are equal to the last bit. It has no polynomial decay. This module does not import torch.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from megatron_optim.errors import OptimError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "polynomial", "WSD"]
AnnealStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]

DECAY_STYLES: tuple[str, ...] = get_args(DecayStyle)
ANNEAL_STYLES: tuple[str, ...] = get_args(AnnealStyle)
INCREASE_STYLES: tuple[str, ...] = get_args(IncreaseStyle)


@dataclass(frozen=True)
class LearningRateSchedule:
    """A linear warm-up followed by a decay to ``min_lr``.

    With ``n`` samples consumed, ``W = warmup_samples`` and ``D = decay_samples``:

    - ``n <= W``: ``init_lr + (max_lr - init_lr) * n / W``
    - ``constant``: ``max_lr``
    - ``n > D``: ``min_lr``
    - ``inverse-square-root``: ``max_lr * sqrt(W) / sqrt(n)``, at least ``min_lr``; 0 counts as 1
    - otherwise ``min_lr + c * (max_lr - min_lr)`` with ``r = (n - W) / (D - W)`` and ``c`` equal to
      ``1 - r`` (``linear``), ``(cos(pi r) + 1) / 2`` (``cosine``) or ``(1 - r) ** power``
      (``polynomial``, with ``power`` as ``decay_power``). ``WSD`` (warm-up, stable,
      decay) has ``c = 1`` until ``D - S`` with ``S = wsd_decay_samples``, and then, with ``r = (n -
      (D - S)) / S``, ``1 - r`` (``linear``), ``(cos(pi r) + 1) / 2`` (``cosine``), ``2 * 0.5**r -
      1`` (``exponential``) or ``1 - sqrt(r)`` (``minus_sqrt``). A decay that begins inside the
      warm-up (``D - S < W``) takes effect at its end, as in megatron-core 0.16.
    """

    max_lr: float
    decay_samples: int
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_samples: int = 0
    decay_style: DecayStyle = "linear"
    wsd_decay_samples: int | None = None
    wsd_decay_style: AnnealStyle = "exponential"
    decay_power: float = 1.0

    def __post_init__(self) -> None:
        _check_choice("decay_style", self.decay_style, DECAY_STYLES)
        _check_choice("wsd_decay_style", self.wsd_decay_style, ANNEAL_STYLES)
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise OptimError(
                "{min_lr} must lie between 0 and {max_lr}; lower the one or raise the other",
                vars(self),
            )
        if not 0.0 <= self.init_lr <= self.max_lr:
            raise OptimError(
                "{init_lr} must lie between 0 and {max_lr}; the warm-up starts there", vars(self)
            )
        if not 0.0 < self.decay_power < math.inf:
            raise OptimError("{decay_power} must be positive", vars(self))
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise OptimError(
                "the warm-up must end before the decay: {warmup_samples}, {decay_samples}; shorten "
                "the warm-up or lengthen the decay",
                vars(self),
            )
        if self.decay_style != "WSD":
            return
        if self.wsd_decay_samples is None:
            raise OptimError(
                "{decay_style} needs {wsd_decay_samples:name}, the length of its decay phase",
                vars(self),
            )
        if self.wsd_decay_samples < 1:
            raise OptimError("{wsd_decay_samples} must be at least 1", vars(self))

    def at(self, samples: int) -> float:
        """Returns the learning rate after ``samples`` samples have been consumed."""
        span = self.max_lr - self.min_lr
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.warmup_samples
        if self.decay_style == "constant":
            return self.max_lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            warmup, consumed = max(self.warmup_samples, 1), max(samples, 1)
            # Megatron-LM's power may differ from math.sqrt in the last bit.
            return max(self.min_lr, self.max_lr * math.pow(warmup, 0.5) / math.pow(consumed, 0.5))
        if self.decay_style == "WSD":
            return self.min_lr + self._annealing(samples) * span
        ratio = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        if self.decay_style == "linear":
            return self.min_lr + (1.0 - ratio) * span
        if self.decay_style == "polynomial":
            return self.min_lr + math.pow(1.0 - ratio, self.decay_power) * span
        return self.min_lr + 0.5 * (math.cos(math.pi * ratio) + 1.0) * span

    def _annealing(self, samples: int) -> float:
        """Returns the coefficient ``c`` of the style ``WSD``."""
        length = cast(int, self.wsd_decay_samples)
        start = self.decay_samples - length
        if samples <= start:
            return 1.0
        ratio = (samples - start) / length
        if self.wsd_decay_style == "linear":
            return 1.0 - ratio
        if self.wsd_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        if self.wsd_decay_style == "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        return 1.0 - math.sqrt(ratio)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay that grows from ``start`` to ``end`` over ``samples`` samples.

    With ``r = n / samples``, the fraction of the growth is ``r`` (``linear``) or ``(cos(pi (1 - r))
    + 1) / 2`` (``cosine``). ``constant`` requires ``start == end``.
    """

    start: float
    end: float
    samples: int
    style: IncreaseStyle = "constant"

    def __post_init__(self) -> None:
        _check_choice("weight decay style", self.style, INCREASE_STYLES)
        if not 0.0 <= self.start <= self.end:
            raise OptimError(
                "the weight decay must not be negative or decrease: {start}, {end}", vars(self)
            )
        if self.style == "constant" and self.start != self.end:
            raise OptimError(
                "a constant weight decay cannot change from {start} to {end}; set {style:name} to "
                "linear or cosine",
                vars(self),
            )
        if self.samples <= 0:
            raise OptimError(f"the weight decay needs at least 1 sample, got {self.samples}")

    def at(self, samples: int) -> float:
        """Returns the weight decay after ``samples`` samples have been consumed."""
        if samples > self.samples:
            return self.end
        ratio = samples / self.samples
        if self.style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start + ratio * (self.end - self.start)


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptimError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
