"""Log lines of a run, in Megatron-LM's format (docs/formats.md).

Every number in a training line covers exactly the steps since the previous line. Megatron-LM
differs in two points: it does not reset its sums after logging step 1, so that the first step after
every resume counts twice, and it leaves out negative losses.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class TrainingLine:
    """The values of one training log line.

    ``milliseconds`` is the mean time of a step. ``losses`` are the losses per token over the
    interval. ``teraflops`` is TFLOP/s per device. ``mfu`` is the fraction of the device's peak
    (0.25 is 25 %). These two are None if they are unknown. ``worst_layers`` has
    values of one layer with the number of that layer.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    milliseconds: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    grad_norm: float
    skipped: int
    nan: int
    tokens_per_second: float
    teraflops: float | None = None
    mfu: float | None = None
    loss_scale: float = 1.0
    num_zeros: float | None = None
    params_norm: float | None = None
    worst_layers: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def render(self, now: datetime) -> str:
        """Returns the line."""
        fields = [
            f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.milliseconds:.1f}",
        ]
        if self.teraflops is not None:
            fields.append(f"throughput per GPU (TFLOP/s/GPU): {self.teraflops:.1f}")
        fields.append(f"learning rate: {self.learning_rate:.6E}")
        fields.append(f"global batch size: {self.global_batch_size:5d}")
        fields += [f"{name}: {value:.6E}" for name, value in self.losses.items()]
        fields += [
            f"loss scale: {self.loss_scale:.1f}",
            f"grad norm: {self.grad_norm:.3f}",
            *([] if self.num_zeros is None else [f"num zeros: {self.num_zeros:.1f}"]),
            *([] if self.params_norm is None else [f"params norm: {self.params_norm:.3f}"]),
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.nan:3d}",
            f"tokens/s: {self.tokens_per_second:.1f}",
        ]
        if self.mfu is not None:
            fields.append(f"MFU: {100 * self.mfu:.1f} %")
        for name, (value, layer) in self.worst_layers.items():
            fields.append(f"{name}: {value:.4g} (layer {layer})")
        return " | ".join(fields) + " |"


def evaluation_lines(
    label: str, values: Mapping[str, float], losses: Collection[str] | None = None
) -> list[str]:
    """Returns the lines of an evaluation: values, and perplexities of losses, between two rules.

    Args:
        label: Position in the run, such as ``iteration 100``.
        values: Values by name.
        losses: Names of the values that are losses; others have no perplexity. Defaults to all.
    """
    text = f" validation loss at {label} | "
    for name, value in values.items():
        text += f"{name} value: {value:.6E} | "
        if losses is None or name in losses:
            text += f"{name} PPL: {math.exp(min(20.0, value)):.6E} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]
