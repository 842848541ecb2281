"""The report page: curves, throughput, events, environment and configuration of a run.

The page is one file and loads nothing from other places.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from megatron_train.atomic_write import write_atomically
from megatron_train.errors import TrainError
from megatron_train.metrics.plot import running_mean
from megatron_train.metrics.records import FILE_NAME, Records, read_records
from megatron_train.report.chart import Curve, Point, format_number, line_chart

CONFIG_FILE = "config.yaml"
_OF_LAYER = re.compile(r"(?P<name>moe/.+)_layer_\d+")
"""Names of measures of one layer."""
_NOT_LOSSES = frozenset(
    {
        *("kind", "iteration", "consumed_samples", "learning_rate", "grad_norm", "updated"),
        *("seconds", "tokens"),
    }
)


def write_report(run: Path, output: Path) -> None:
    """Writes the report page of the run in folder ``run``; an earlier page is replaced atomically.

    Raises:
        TrainError: The folder has no metrics file, or the file cannot be read.
    """
    metrics = run / FILE_NAME
    if not metrics.is_file():
        raise TrainError(f"{run} has no {FILE_NAME}; give the --save folder of a run")
    configuration = run / CONFIG_FILE
    text = ""
    if configuration.is_file():
        text = configuration.read_text(encoding="utf-8", errors="replace")
    page = render_page(run.resolve().name, read_records(metrics), text)
    with write_atomically(output) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")


def render_page(name: str, records: Records, configuration: str) -> str:
    """Returns the report page as HTML."""
    marks = [e["iteration"] for e in records.events if e["event"] == "start" and e["iteration"]]
    keys = [key for key in (records.train or [{}])[-1] if key not in _NOT_LOSSES]
    losses = [key for key in keys if not _OF_LAYER.fullmatch(key)]
    charts = [_loss_chart(records, loss, marks) for loss in losses]
    for title, key in (("Learning rate", "learning_rate"), ("Gradient norm", "grad_norm")):
        charts.append(
            line_chart(title, [Curve(title.lower(), finite_points(records.train, key))], marks)
        )
    charts += _layer_charts(records, keys, marks)
    charts.append(_throughput_chart(records, marks))
    style = files("megatron_train.report").joinpath("page.css").read_text(encoding="utf-8")
    script = files("megatron_train.report").joinpath("page.js").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: training report</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(name)}</h1><p>{escape(run_status(records))}</p></header>"
        f'<section class="tiles">{_tiles(records, losses)}</section>'
        f'<section class="charts">{"".join(charts) or "<p>No step is recorded yet.</p>"}</section>'
        f"<section><h2>Events</h2>{_events(records.events)}</section>"
        f"<section><h2>Environment</h2>{_environment(records.events)}</section>"
        f"<section><h2>Configuration</h2><pre>{escape(configuration) or 'not recorded'}</pre>"
        f"</section><script>{script}</script></body></html>\n"
    )


def run_status(records: Records) -> str:
    """Returns the last step of the run and the reason of its end in one sentence."""
    last = records.train[-1]["iteration"] if records.train else 0
    final = records.events[-1] if records.events else {}
    if final.get("event") != "end":
        return f"Running or killed; the last recorded step is {last}."
    reason = final.get("reason")
    if reason == "done":
        return f"Done after step {last}."
    return f"Stopped after step {last}: {reason}."


def finite_points(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Returns step and value of the records whose value of `key` is finite."""
    found = [(float(r["iteration"]), r.get(key)) for r in records]
    return [(step, float(v)) for step, v in found if v is not None and math.isfinite(v)]


def _loss_chart(records: Records, loss: str, marks: Sequence[float]) -> str:
    points = finite_points(records.train, loss)
    smooth = running_mean([value for _, value in points], len(points) // 100)
    lines = [
        Curve(loss, points, "faint"),
        Curve("training", [(step, v) for (step, _), v in zip(points, smooth, strict=True)]),
        Curve("validation", finite_points(records.validation, loss), "second", dots=True),
    ]
    return line_chart(f"{loss} (nats per token)", lines, marks)


def _layer_charts(records: Records, keys: Sequence[str], marks: Sequence[float]) -> list[str]:
    """Returns a chart for each measure of layers, with its range over the layers of each step."""
    layers: dict[str, list[str]] = {}
    for key in keys:
        if (match := _OF_LAYER.fullmatch(key)) is not None:
            layers.setdefault(match["name"], []).append(key)
    charts = []
    for name, of_layers in layers.items():
        curves = [Curve(key, finite_points(records.train, key), "faint") for key in of_layers]
        by_step: dict[float, list[float]] = {}
        for curve in curves:
            for step, value in curve.points:
                by_step.setdefault(step, []).append(value)
        for what, style, pick in (("largest", "first", max), ("smallest", "second", min)):
            points = [(step, pick(values)) for step, values in sorted(by_step.items())]
            curves.append(Curve(f"{what} of {len(of_layers)} layers", points, style))
        charts.append(line_chart(name.replace("_", " "), curves, marks))
    return charts


def _throughput_chart(records: Records, marks: Sequence[float]) -> str:
    points = [(float(r["iteration"]), rate) for r in records.train if (rate := _rate(r))]
    smooth = running_mean([value for _, value in points], len(points) // 50)
    lines = [
        Curve("tokens/s", points, "faint"),
        Curve("tokens/s", [(step, v) for (step, _), v in zip(points, smooth, strict=True)]),
    ]
    return line_chart("Throughput (tokens per second)", lines, marks)


def _tiles(records: Records, losses: Sequence[str]) -> str:
    train, facts = records.train, list[tuple[str, str]]()
    if not train:
        return ""
    facts.append(("steps", f"{train[-1]['iteration']:,}"))
    facts.append(("tokens", format_number(_total(train, "tokens"))))
    for loss in losses:
        if records.log:
            line = records.log[-1]
            over = f"{loss} of the log line of step {line['iteration']:,}, over its interval"
            facts.append((over, _value(line.get(loss))))
        facts.append((f"{loss} of step {train[-1]['iteration']:,} alone", _value(train[-1][loss])))
        validation = finite_points(records.validation, loss)
        if validation:
            step, best = min(validation, key=lambda point: point[1])
            facts.append((f"best validation {loss}, step {step:g}", f"{best:.4f}"))
    if rates := [rate for record in train if (rate := _rate(record))]:
        facts.append(("tokens/s, median of steps", format_number(median(rates))))
    seconds = min(round(_total(train, "seconds")), timedelta.max // timedelta(seconds=1))
    facts.append(("in steps", str(timedelta(seconds=seconds))))
    skipped = sum(record.get("updated") is False for record in train)
    if skipped:
        facts.append(("skipped steps", f"{skipped:,}"))
    return "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in facts)


def _rate(record: Mapping[str, Any]) -> float | None:
    """Returns the tokens per second of a step, or None if they are not recorded."""
    tokens, seconds = record.get("tokens"), record.get("seconds")
    return None if tokens is None or not seconds or seconds < 0 else tokens / seconds


def _total(records: Sequence[Mapping[str, Any]], key: str) -> float:
    """Returns the sum over the records that have the key; at least 0."""
    return max(0.0, float(sum(record.get(key) or 0 for record in records)))


def _value(value: float | None) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not finite"


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    rows, layout = [], None
    for event in events:
        details = str(event.get("reason", ""))
        if event["event"] == "test":
            losses = {key: event[key] for key in event if key not in ("kind", "event", "iteration")}
            details = ", ".join(f"{loss} {_value(value)}" for loss, value in losses.items())
        if event["event"] == "start":
            current = event.get("layout")
            changed = None not in (current, layout) and current != layout
            details = f"new layout: {current} (before: {layout})" if changed else str(current or "")
            layout = current or layout
        rows.append((f"{event['iteration']:,}", event["event"], details))
    return _table(("step", "event", ""), rows)


def _environment(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the facts of all starts, with one value where they agree."""
    starts = [event for event in events if event["event"] == "start"]
    keys = [k for k in (starts or [{}])[-1] if k not in ("kind", "event", "iteration")]
    rows = []
    for key in keys:
        values = dict.fromkeys(str(start.get(key, "unknown")) for start in starts)
        rows.append((key, " → ".join(values)))
    return _table(("", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(title)}</th>" for title in head) if any(head) else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{cells}</tr>' if cells else ''}{body}</table>"
