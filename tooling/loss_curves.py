"""Draws losses of runs in several layouts: one panel for each recipe, one line for each run.

    python tooling/loss_curves.py RUNS docs/images/layout-losses.png deepseek-tiny mistral-tiny

RUNS has the folders `<recipe>-one`, `<recipe>-tp2` and `<recipe>-pp2` of `megatron-train pretrain`
with `--log-interval 1`. Prints the largest difference to the run on one rank.
"""

import argparse
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from megatron_train import read_records

LOSSES = {"lm loss": "tab:blue", "mtp_1 loss": "tab:orange"}
LAYOUTS = {
    "one": ("one rank", (0, ())),
    "tp2": ("tp 2", (0, (6, 6))),
    "pp2": ("pp 2", (6, (6, 6))),
}


def curve(folder: Path, loss: str) -> tuple[list[int], list[float]]:
    """Returns steps and losses of a run; nothing if the run has no such loss."""
    records = [r for r in read_records(folder / "metrics.jsonl").train if r.get(loss) is not None]
    return [r["iteration"] for r in records], [r[loss] for r in records]


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("recipes", nargs="+")
    arguments = parser.parse_args()
    figure = Figure(figsize=(5 * len(arguments.recipes), 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(arguments.recipes), sharey=True, squeeze=False)[0]
    for axes, recipe in zip(panels, arguments.recipes, strict=True):
        for loss, color in LOSSES.items():
            alone = curve(arguments.runs / f"{recipe}-one", loss)[1]
            for layout, (title, style) in LAYOUTS.items():
                steps, values = curve(arguments.runs / f"{recipe}-{layout}", loss)
                if not values:
                    continue
                label, width = f"{loss}, {title}", 2.5 if layout == "one" else 1.5
                shade = {"alpha": 0.4 if layout == "one" else 1.0, "linewidth": width}
                axes.plot(steps, values, color=color, linestyle=style, label=label, **shade)
                worst = max(abs(a - b) for a, b in zip(values, alone, strict=True))
                print(
                    f"{recipe}, {title}, {loss}: {values[0]:.3f} to {values[-1]:.3f}, {worst:.1e}"
                )
        axes.set_title(recipe)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("loss (nats per token)")
    figure.savefig(arguments.output)


if __name__ == "__main__":
    main()
