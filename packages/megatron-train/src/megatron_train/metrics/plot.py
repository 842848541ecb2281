"""The loss plot of a run."""

from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_train.atomic_write import write_atomically
from megatron_train.metrics.records import Records

FILE_NAME = "loss.png"


def plot_losses(records: Records, loss: str, path: Path) -> None:
    """Draws training and validation loss over steps into the PNG file ``path``.

    The loss of every step is drawn faintly, with its running mean on top.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps, values = _curve(records.train, loss)
    if values:
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=1)
        smooth = running_mean(values, len(values) // 100)
        axes.plot(steps, smooth, color="tab:blue", label="train")
    evaluated, validation = _curve(records.validation, loss)
    if validation:
        axes.plot(
            evaluated, validation, color="tab:orange", marker="o", markersize=4, label="validation"
        )
    axes.set_xlabel("step")
    axes.set_ylabel(f"{loss} (nats per token)")
    axes.set_title(f"{loss} by step")
    axes.grid(alpha=0.3)
    if values or validation:
        axes.legend()
    with write_atomically(path) as temporary:
        figure.savefig(temporary, format="png")


def running_mean(values: list[float], reach: int) -> list[float]:
    """Returns for each value the mean over itself and up to ``reach`` values on either side."""
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def _curve(records: list[dict[str, Any]], loss: str) -> tuple[list[int], list[float]]:
    """Returns steps and losses of the records with a finite loss."""
    finite = [record for record in records if record.get(loss) is not None]
    return [record["iteration"] for record in finite], [record[loss] for record in finite]
