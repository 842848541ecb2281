"""The memory of ranks at their peaks, as a picture."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_parallel.imagined.storages import OTHER

from megatron_train.atomic_write import write_atomically
from megatron_train.config.run import RunConfig
from megatron_train.dry_run.counts import RankUse
from megatron_train.dry_run.report import PARTS, parts_at_peak
from megatron_train.report.picture import check_picture_path

__all__ = ["check_picture_path", "draw_memory"]

_GIB: Final = 1 << 30
_COLORS: Final = ("#1b4965", "#5fa8d3", "#bee9e8", "#e07a5f")
_FILES: Final = 5


def draw_memory(run: RunConfig, uses: Sequence[RankUse], path: Path) -> None:
    """Draws the parts of memory of each rank, and the files whose activations are largest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.7 * len(uses) + 2.2), dpi=150, layout="constrained")
    parts, files = figure.subplots(2, 1, height_ratios=(len(uses) + 0.5, _FILES * 0.55))
    figure.suptitle(f"Memory of a step: {run.layout}", fontsize=11)
    names = [f"rank {use.rank}\n(pipeline rank {use.pipeline_rank})" for use in uses]
    left = [0.0] * len(uses)
    for part, color in zip(PARTS, _COLORS, strict=True):
        sizes = [parts_at_peak(use)[part] / _GIB for use in uses]
        parts.barh(names, sizes, left=left, color=color, label=part, height=0.6)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, use in enumerate(uses):
        parts.text(left[row], row, f" {use.peak / _GIB:,.1f} GiB", va="center", fontsize=9)
    parts.invert_yaxis()
    parts.set_xlim(0, max(left) * 1.12)
    parts.set_xlabel("GiB at the peak")
    parts.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False, fontsize=9
    )
    largest = max(uses, key=lambda use: use.peak)
    held: Counter[str] = Counter()
    for (part, line), nbytes in largest.at_peak.items():
        if part == OTHER:
            held[line.partition(":")[0]] += nbytes
    shown = held.most_common(_FILES)
    files.barh([name for name, _ in shown], [n / _GIB for _, n in shown], color=_COLORS[-1])
    files.invert_yaxis()
    files.set_xlabel(f"GiB of {OTHER} on rank {largest.rank} at the peak, by file")
    for axes in (parts, files):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    with write_atomically(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:])
