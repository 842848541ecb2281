"""Pictures of simulated pipeline steps: as text, or as boxes and words that become SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from math import gcd, lcm
from typing import Final, Literal, NamedTuple

from megatron_parallel.errors import LayoutError
from megatron_parallel.pipeline.simulator import Event, PassDurations, Timeline, simulate

MAX_CELLS: Final = 4000
"""Maximum number of time units in a line of text."""

_COLOURS: Final = {  # by kind of pass, first and last chunk
    "F": ((0x9E, 0xC5, 0xF4), (0x2F, 0x6F, 0xC2)),
    "B": ((0xA9, 0xDC, 0xA8), (0x2E, 0x8B, 0x57)),
    "I": ((0x9F, 0xE0, 0xD8), (0x1F, 0x8A, 0x84)),
    "W": ((0xF8, 0xD4, 0x8F), (0xD0, 0x83, 0x1A)),
}
_NAMES: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input",
    "W": "backward, weights",
}


def draw_schedule(
    schedule: str, pp: int, micro_batches: int, vpp: int = 1, times: PassDurations | None = None
) -> str:
    """Returns a schedule as text: `draw_timeline` of `simulate`."""
    return draw_timeline(simulate(schedule, pp, micro_batches, vpp, times or PassDurations()))


def draw_timeline(timeline: Timeline) -> str:
    """Returns one line per rank, with time from left to right and dots for idle time.

    A cell is one unit of time: the largest of which all durations are multiples. `F2` is the
    forward pass of micro-batch 2, `B2` its backward pass, `I2` and `W2` the halves of a split one.
    With several chunks a letter names the chunk, `a` for the first. `F3+B1` are two passes that
    overlap. The last line is that of `summarize`.

    Raises:
        LayoutError: The picture would be wider than `MAX_CELLS` units.
    """
    unit = _unit(timeline)
    cells = int(timeline.end / unit)
    if cells > MAX_CELLS:
        raise LayoutError(
            f"{cells} units of {float(unit):g} exceed the {MAX_CELLS} of a picture in text: round "
            "the durations"
        )
    width = len(str(timeline.micro_batches - 1)) + 2 + (timeline.vpp > 1)  # "F12a ": a unit
    idle = " .".rjust(width)
    lines = []
    for rank, events in enumerate(timeline.ranks):
        line = ""
        for event in events:
            line += idle * (int(event.start / unit) - len(line) // width)
            length = int((event.end - event.start) / unit)
            line += f"{'+' if event.overlapped else ' '}{_name(event, timeline)}".ljust(
                width * length, " " if event.action.kind == "F" else "-"
            )
        line += idle * (cells - len(line) // width)
        lines.append(f"rank {str(rank).ljust(len(str(len(timeline.ranks) - 1)))} |{line} |")
    return "\n".join([*lines, summarize(timeline)])


def summarize(timeline: Timeline) -> str:
    """Returns the bubble and each rank's most in-flight micro-batches, in one line."""
    peaks = ", ".join(f"{float(count):g}" for count in timeline.peak_in_flight)
    return (
        f"bubble {float(timeline.bubble_fraction):.1%}; in-flight micro-batches at most, by rank: "
        f"{peaks}"
    )


class Box(NamedTuple):
    """A filled rectangle of a picture, in pixels from the upper left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Text(NamedTuple):
    """A text of a picture; `y` is its vertical centre, `size` its height in pixels."""

    x: float
    y: float
    text: str
    size: float
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass(frozen=True)
class Picture:
    """Boxes and texts, in drawing order; colours are `#rrggbb`."""

    width: float
    height: float
    boxes: Sequence[Box]
    texts: Sequence[Text]

    def svg(self) -> str:
        """Returns the picture as an SVG document."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="sans-serif">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for box in self.boxes:
            parts.append(
                f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" '
                f'height="{box.height:.2f}" fill="{box.fill}"/>'
            )
        for t in self.texts:
            parts.append(
                f'<text x="{t.x:.2f}" y="{t.y:.2f}" font-size="{t.size:g}" '
                f'text-anchor="{t.anchor}" dominant-baseline="central">{escape(t.text)}</text>'
            )
        return "\n".join([*parts, "</svg>", ""])


def draw_picture(timeline: Timeline, width: float = 1000) -> Picture:
    """Returns a picture with a row for each rank and time from left to right.

    Boxes of the first chunk are the lightest.
    """
    left, right, top, row, gap = 64.0, 14.0, 52.0, 30.0, 6.0
    scale = (width - left - right) / float(timeline.end)
    boxes, texts = [], [Text(14, 20, _title(timeline), 15), Text(14, 39, summarize(timeline), 12)]
    for rank, events in enumerate(timeline.ranks):
        y = top + rank * (row + gap)
        texts.append(Text(14, y + row / 2, f"rank {rank}", 12))
        boxes.append(Box(left, y, width - left - right, row, "#eeeeee"))
        for event in events:
            x, length = left + float(event.start) * scale, float(event.end - event.start) * scale
            boxes.append(Box(x, y, max(length - 1, 0.5), row, _colour(event, timeline)))
            number = str(event.action.micro_batch)
            if length > 7 * len(number) + 3:
                texts.append(Text(x + length / 2, y + row / 2, number, 11, "middle"))
    bottom = top + len(timeline.ranks) * (row + gap)
    texts += [
        Text(left, bottom + 6, "0", 11),
        Text(width - right, bottom + 6, f"time {float(timeline.end):g}", 11, "end"),
    ]
    _add_legend(timeline, left, bottom + 20, boxes, texts)
    return Picture(width, bottom + 44, boxes, texts)


def _add_legend(
    timeline: Timeline, x: float, y: float, boxes: list[Box], texts: list[Text]
) -> None:
    kinds = {event.action.kind for events in timeline.ranks for event in events}
    for kind, name in _NAMES.items():
        if kind not in kinds:
            continue
        for chunk in range(timeline.vpp):
            boxes.append(Box(x, y, 14, 14, _shade(kind, chunk, timeline.vpp)))
            x += 16
        texts.append(Text(x + 3, y + 7, name, 12))
        x += 6.5 * len(name) + 26
    if timeline.vpp > 1:
        texts.append(Text(x, y + 7, f"(light to dark: chunks 1 to {timeline.vpp} of a rank)", 12))


def _title(timeline: Timeline) -> str:
    chunks = f" of {timeline.vpp} chunks" if timeline.vpp > 1 else ""
    many = f"{timeline.micro_batches} micro-batches"
    return f"{timeline.schedule}: {len(timeline.ranks)} ranks{chunks}, {many}"


def _name(event: Event, timeline: Timeline) -> str:
    chunk = "abcdefghijklmnopqrstuvwxyz"[_chunk(event, timeline) % 26] if timeline.vpp > 1 else ""
    return f"{event.action}{chunk}"


def _chunk(event: Event, timeline: Timeline) -> int:
    return event.action.stage // len(timeline.ranks)


def _colour(event: Event, timeline: Timeline) -> str:
    return _shade(event.action.kind, _chunk(event, timeline), timeline.vpp)


def _shade(kind: str, chunk: int, chunks: int) -> str:
    light, dark = _COLOURS[kind]
    part = 0.25 if chunks == 1 else chunk / (chunks - 1) * 0.75
    mixed = (round(a + (b - a) * part) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _unit(timeline: Timeline) -> Fraction:
    kinds = {event.action.kind for events in timeline.ranks for event in events}
    lengths = [
        x for name, x in timeline.times.exact_durations.items() if x and name in {*kinds, "send"}
    ]
    below = lcm(*(length.denominator for length in lengths))
    return Fraction(gcd(*(int(length * below) for length in lengths)), below)
