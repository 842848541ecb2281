"""Draws the losses that `transfer.py` measured, and prints them as a table.

python tooling/widths/picture.py OUT.json docs/images/mup-transfer.png
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from widths.training import BASE

TITLES = {False: "standard", True: "maximal update"}
Losses = dict[int, dict[float, float]]
"""Loss by width and learning rate."""


def losses_of(runs: list[dict[str, float]], mup: bool) -> Losses:
    """Returns the mean losses of one parametrization; the base width belongs to both."""
    found: dict[int, dict[float, list[float]]] = {}
    for run in sorted(runs, key=lambda run: (run["width"], run["lr"])):
        if run["mup"] == mup or run["width"] == BASE:
            found.setdefault(int(run["width"]), {}).setdefault(run["lr"], []).append(run["loss"])
    return {
        width: {lr: statistics.fmean(each) for lr, each in losses.items()}
        for width, losses in found.items()
    }


def best(losses: dict[float, float]) -> float:
    """Returns the learning rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def power(lr: float) -> str:
    """Returns a learning rate as a power of 2."""
    return f"2^{round(math.log2(lr))}"


def draw(axes: Axes, title: str, found: Losses) -> None:
    """Draws one line for each width, with a mark at its lowest loss."""
    shades = ScalarMappable(Normalize(-1, len(found) - 1), "viridis_r")
    for number, (width, losses) in enumerate(found.items()):
        color, lowest = shades.to_rgba(number), best(losses)
        axes.plot(list(losses), list(losses.values()), ".-", color=color, label=f"width {width}")
        axes.plot(lowest, losses[lowest], "o", color=color, markersize=10, markeredgecolor="black")
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("learning rate")
    axes.grid(alpha=0.3)
    axes.legend(title="best marked by a circle", fontsize=8, title_fontsize=8)


def table(found: Losses) -> list[str]:
    """Returns the lines of a table; the lowest loss of each width is bold."""
    rates = sorted({lr for losses in found.values() for lr in losses})
    lines = [f"| width | {' | '.join(map(power, rates))} | best |"]
    lines.append("|--:|" + "--:|" * len(rates) + "---|")
    for width, losses in found.items():
        lowest = best(losses)
        cells = [
            ""
            if lr not in losses
            else f"{'**' * (lr == lowest)}{losses[lr]:.3f}{'**' * (lr == lowest)}"
            for lr in rates
        ]
        lines.append(f"| {width:,} | {' | '.join(cells)} | {power(lowest)} |")
    return lines


def main() -> None:
    """Draws the picture and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    runs = json.loads(arguments.runs.read_text())
    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (mup, title) in zip(panels, TITLES.items(), strict=True):
        found = losses_of(runs, mup)
        draw(axes, f"{title} parametrization", found)
        print("\n".join([f"\n{title}:\n", *table(found)]))
    panels[0].set_ylabel("loss at the end (nats per byte)")
    figure.savefig(arguments.output)


if __name__ == "__main__":
    main()
