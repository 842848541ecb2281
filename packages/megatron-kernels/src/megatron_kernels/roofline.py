"""A picture of a benchmark: rates of calls below the roofs of the device."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_kernels.bench import Measurement, Report
from megatron_kernels.errors import KernelError

_MARKERS = "osD^vPX*"


def write_roofline(reports: Sequence[Report], path: Path, title: str) -> None:
    """Draws a file whose format follows from its name, such as PNG or SVG.

    The upper panel is a roofline of calls with matrix products: their floating-point operations a
    second over those for each byte that they must move, below the rates of the device. The lower
    panel has all calls: the bound as a share of the time of both passes.

    Args:
        reports: Measurements, with the rates of the same rounds.
        path: The file.
        title: Title of the picture.

    Raises:
        KernelError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KernelError(
            f"--picture needs matplotlib ({error}); pip install megatron-kernels[bench]"
        ) from None
    measured = [each for _, found in reports for each in found if each.reason is None]
    flops = median(rates.flops for rates, _ in reports)
    moved = median(rates.bytes for rates, _ in reports)
    titles = list(dict.fromkeys(each.title for each in measured))
    backends = list(dict.fromkeys(each.backend for each in measured))
    style = {
        name: {"color": f"C{number % 10}", "marker": _MARKERS[number % len(_MARKERS)]}
        for number, name in enumerate(backends)
    }
    figure = Figure(figsize=(9, 5 + 0.28 * len(titles)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    roof, bars = figure.subplots(2, 1, height_ratios=(5, max(1.0, 0.28 * len(titles))))
    figure.suptitle(title)
    _draw_roof(roof, [each for each in measured if each.products], style, flops, moved)
    for each in measured:
        bars.plot(100 * each.share, titles.index(each.title), linestyle="", **style[each.backend])
    bars.set_yticks(range(len(titles)), titles)
    bars.invert_yaxis()
    bars.set_xlim(0, None)
    bars.axvline(100, color="black", linewidth=1)
    bars.set_xlabel("bound as a share of the time of both passes (%)")
    bars.grid(alpha=0.3)
    handles = [
        bars.plot([], [], linestyle="", label=name, **options)[0] for name, options in style.items()
    ]
    bars.legend(handles=handles, fontsize=8, loc="best")
    figure.savefig(path)


def _draw_roof(
    axes: Any,
    measured: Sequence[Measurement],
    style: dict[str, dict[str, str]],
    flops: float,
    moved: float,
) -> None:
    """Draws the roofs and a point for each backend of each call with products."""
    intensities = [each.products / each.moved for each in measured] or [1.0]
    ends = (min(*intensities, flops / moved) / 4, max(*intensities, flops / moved) * 4)
    steps = [ends[0] * (ends[1] / ends[0]) ** (i / 200) for i in range(201)]
    axes.loglog(steps, [min(flops, moved * x) / 1e9 for x in steps], color="black")
    best: dict[str, tuple[float, float]] = {}
    for each in measured:
        x, y = each.products / each.moved, each.products / (each.both or each.forward) / 1e9
        axes.loglog(x, y, linestyle="", **style[each.backend])
        best[each.title] = max(best.get(each.title, (x, 0.0)), (x, y), key=lambda point: point[1])
    middle = (ends[0] * ends[1]) ** 0.5
    by_rate = sorted(best.items(), key=lambda item: item[1][1])
    for number, (title, point) in enumerate(by_rate):  # neighbours above and below their points
        left = point[0] > middle
        offset = (-6 if left else 6, 3 if number % 2 else -9)
        placed = {"xytext": offset, "ha": "right" if left else "left"}
        axes.annotate(title, point, fontsize=7, textcoords="offset points", **placed)
    axes.set_xlabel("floating-point operations of products for each byte that must move")
    axes.set_ylabel("GFLOP/s, both passes")
    axes.set_title(
        f"measured roofs: {flops / 1e9:,.0f} GFLOP/s (product), {moved / 1e9:,.1f} GB/s (copy)",
        fontsize=9,
    )
    axes.grid(alpha=0.3, which="both")
