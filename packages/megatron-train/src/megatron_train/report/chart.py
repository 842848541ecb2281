"""Line charts as SVG text of limited size.

A chart is complete without a script. The script of the page only shows the values under the
pointer, which are in an attribute of the SVG element.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 560
HEIGHT: Final = 260
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 12, 30
MAX_POINTS: Final = 500
"""Maximum number of points of a curve; longer curves are downsampled."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One curve.

    Attributes:
        name: Name in the legend.
        points: Pairs of step and finite value, ordered by step.
        style: CSS class: ``first``, ``second``, or ``faint``, which is left out of the legend.
        dots: Whether every point is marked with a dot.
    """

    name: str
    points: Sequence[Point]
    style: str = "first"
    dots: bool = False


class Scale(NamedTuple):
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Returns the coordinate of ``value`` in pixels."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(title: str, lines: Sequence[Curve], marks: Sequence[float] = ()) -> str:
    """Returns an HTML figure with legend: ``lines`` over steps, and a vertical line at each mark.

    Returns an empty string if no curve has a point.
    """
    shown = [Curve(x.name, downsampled(x.points), x.style, x.dots) for x in lines if x.points]
    if not shown:
        return ""
    steps = [x for line in shown for x, _ in line.points]
    x = Scale(min(steps), max(*steps, min(steps) + 1), LEFT, WIDTH - RIGHT)
    low, high = _range([value for line in shown for _, value in line.points])
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y)]
    for step in marks:
        if x.low <= step <= x.high:
            at = f'x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
            parts.append(f'<line class="mark" {at}><title>continued after {step:g}</title></line>')
    parts += [_curve(line, x, y) for line in shown]
    named = [line for line in shown if line.style != "faint"]
    legend = "".join(f'<span class="{n.style}">{escape(n.name)}</span>' for n in named)
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end],
        "lines": [{"name": n.name, "style": n.style, "points": list(n.points)} for n in named],
    }
    return (
        f'<figure><figcaption>{escape(title)}<span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f"data-chart='{escape(json.dumps(data), quote=True)}'>{''.join(parts)}</svg></figure>"
    )


def downsampled(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Returns about ``most`` points at most: the smallest and largest value of each interval."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def ticks(low: float, high: float, about: int) -> list[float]:
    """Returns round numbers between ``low`` and ``high``, approximately ``about`` of them."""
    step = (high - low) / about
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def format_number(value: float) -> str:
    """Returns a number as a short label, with an SI prefix from 10,000 on."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if prefix == 'k' else limit):.4g}{prefix}"
    return f"{value:.4g}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the range of the values with a margin; never empty."""
    low, high = min(values), max(values)
    air = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return (max(0.0, low - air) if low >= 0 else low - air), high + air


def _grid(x: Scale, y: Scale) -> str:
    parts = []
    for value in ticks(y.low, y.high, 5):
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">{format_number(value)}</text>'
        )
    for value in ticks(x.low, x.high, 6):
        at = f"{x(value):.1f}"
        parts.append(
            f'<text x="{at}" y="{HEIGHT - 10}" text-anchor="middle">{format_number(value)}</text>'
        )
    return "".join(parts)


def _curve(line: Curve, x: Scale, y: Scale) -> str:
    points = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in line.points]
    path = " ".join(f"{a},{b}" for a, b in points)
    drawn = f'<polyline class="{line.style}" points="{path}"/>'
    if line.dots or len(points) == 1:
        drawn += "".join(
            f'<circle class="{line.style}" cx="{a}" cy="{b}" r="3"/>' for a, b in points
        )
    return drawn
