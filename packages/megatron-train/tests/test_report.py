import json
import math
import re

import pytest
from megatron_train.cli import main
from megatron_train.metrics.records import Records
from megatron_train.report.chart import Curve, downsampled, format_number, line_chart, ticks
from megatron_train.report.page import finite_points, render_page, run_status

START = {
    "kind": "event",
    "event": "start",
    "iteration": 0,
    "torch": "2.13.0",
    "commit": "abc",
    "layout": "1 rank",
}
AGAIN = {**START, "iteration": 2, "torch": "2.14.0", "layout": "2 ranks, tp 2"}


def step(iteration, loss, **more):
    return {
        "kind": "train",
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "lm loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "updated": True,
        "seconds": 0.5,
        "tokens": 100,
        **more,
    }


RECORDS = Records(
    train=[step(1, 5.0), step(2, 4.0), step(3, None, updated=False, grad_norm=None), step(4, 3.5)],
    validation=[
        {"kind": "validation", "iteration": 2, "lm loss": 4.5},
        {"kind": "validation", "iteration": 4, "lm loss": 4.25},
    ],
    events=[
        START,
        AGAIN,
        {"kind": "event", "event": "test", "iteration": 4, "lm loss": 4.125},
        {"kind": "event", "event": "end", "iteration": 4, "reason": "done"},
    ],
    log=[{"kind": "log", "iteration": 2, "lm loss": 4.5}],
)


def tile(page, label):
    return re.search(rf"<b>([^<]*)</b><span>{re.escape(label)}</span>", page)[1]


def test_the_page_shows_the_records():
    page = render_page("run", RECORDS, "model: {num_layers: 2}")
    assert "Done after step 4." in page
    assert tile(page, "steps") == "4" and tile(page, "tokens") == "400"
    assert tile(page, "lm loss of the log line of step 2, over its interval") == "4.5000"
    assert tile(page, "lm loss of step 4 alone") == "3.5000"
    assert tile(page, "best validation lm loss, step 4") == "4.2500"
    assert tile(page, "tokens/s, median of steps") == "200"
    assert tile(page, "in steps") == "0:00:02" and tile(page, "skipped steps") == "1"
    assert "2.13.0 → 2.14.0" in page and "model: {num_layers: 2}" in page
    assert page.count("<svg") == 4 and page.count('class="mark"') == 4
    assert "continued after 2" in page
    assert re.findall(r"<td>start</td><td>([^<]*)</td>", page) == [
        "1 rank",
        "new layout: 2 ranks, tp 2 (before: 1 rank)",
    ]
    assert "<td>4</td><td>test</td><td>lm loss 4.1250</td>" in page


def test_measures_of_layers_have_a_chart_with_their_range():
    def layers(first, third):
        return {"moe/largest_load_layer_0": first, "moe/largest_load_layer_2": third}

    train = [
        step(1, 5.0, **layers(1.0, 3.0)),
        step(2, 4.0, **layers(4.0, 2.0)),
        step(3, 4.0, **layers(None, 7.0)),
    ]
    page = render_page("run", Records(train, [], [START]), "")
    figure = re.search(r"<figure><figcaption>moe/largest load<.*?</figure>", page)[0]
    found = {line["name"]: line["points"] for line in data_of(figure)["lines"]}
    assert found == {
        "largest of 2 layers": [[1, 3], [2, 4], [3, 7]],
        "smallest of 2 layers": [[1, 1], [2, 2], [3, 7]],
    }
    assert figure.count('<polyline class="faint"') == 2
    assert "layer_0 of step" not in page and "skipped steps" not in page


def figure_of(page, title):
    """Returns the figure of a page with a title, and the points of its named curves."""
    figure = re.search(rf"<figure><figcaption>{re.escape(title)}<.*?</figure>", page)[0]
    return figure, {line["name"]: line["points"] for line in data_of(figure)["lines"]}


@pytest.mark.parametrize(("steps", "losses", "rates"), [(99, 0, 1), (100, 1, 2)])
def test_losses_and_rates_are_means_over_a_hundredth_and_a_fiftieth_of_the_steps_on_each_side(
    steps, losses, rates
):
    """The 50th step has a loss of 9 and ten times the rate of 200 tokens per second."""
    numbers = range(1, steps + 1)
    train = [step(n, 9.0 if n == 50 else 0.0) for n in numbers]
    train[49]["seconds"] = 0.05
    page = render_page("run", Records(train, RECORDS.validation, [START]), "")
    figure, curves = figure_of(page, "lm loss (nats per token)")
    mean = 9.0 / (2 * losses + 1)
    assert curves["training"] == [[n, mean if abs(n - 50) <= losses else 0.0] for n in numbers]
    assert curves["validation"] == [[2, 4.5], [4, 4.25]]
    assert figure.count('<circle class="second"') == 2 and "<circle class" in figure
    _, curves = figure_of(page, "Throughput (tokens per second)")
    mean = (2 * rates * 200 + 2000) / (2 * rates + 1)
    expected = [[n, mean if abs(n - 50) <= rates else 200] for n in numbers]
    assert [[n, pytest.approx(rate)] for n, rate in curves["tokens/s"]] == expected


def test_losses_and_facts_are_those_of_the_last_step_and_start():
    train = [step(1, 5.0), step(2, 4.5), step(3, 4.0, **{"z loss": 2.0})]
    log = [{"kind": "log", "iteration": n, "lm loss": 8.0 / n} for n in (1, 2, 4)]
    bare = {"kind": "event", "event": "start", "iteration": 0}
    page = render_page("run", Records(train, [], [bare, bare, START], log), "")
    assert tile(page, "z loss of step 3 alone") == "2.0000"
    assert figure_of(page, "z loss (nats per token)")[1] == {"training": [[3, 2]]}
    assert tile(page, "lm loss of the log line of step 4, over its interval") == "2.0000"
    assert "<td>commit</td><td>unknown → abc</td>" in page


def test_the_rate_and_the_norm_have_charts_of_their_own():
    train = [step(n, 1.0, learning_rate=0.5 / n, grad_norm=2.0 * n) for n in (1, 2)]
    page = render_page("run", Records(train, [], [START]), "")
    assert figure_of(page, "Learning rate")[1] == {"learning rate": [[1, 0.5], [2, 0.25]]}
    assert figure_of(page, "Gradient norm")[1] == {"gradient norm": [[1, 2], [2, 4]]}


def test_a_page_says_what_there_is_none_of():
    none, some = (render_page("run", each, "") for each in (Records([], [], []), RECORDS))
    for page, empty in ((none, True), (some, False)):
        assert ("<p>No step is recorded yet.</p>" in page) == empty
        assert "<h2>Configuration</h2><pre>not recorded</pre>" in page
    assert "not recorded" not in render_page("run", RECORDS, "model: {}")


def test_a_time_beyond_all_calendars_is_the_longest_one():
    page = render_page("run", Records([step(1, 1.0, seconds=1e50)], [], []), "")
    assert tile(page, "in steps") == "999999999 days, 23:59:59"


def test_tiles_leave_out_what_is_not_recorded():
    old = {"kind": "train", "iteration": 1, "lm loss": 4.5}
    odd = [
        {**old, "iteration": 1200, "tokens": 30, "seconds": -1.0},
        {**old, "iteration": 1201, "tokens": 30, "seconds": 0},
        {**old, "iteration": 1202, "tokens": 30, "seconds": 1.0, "lm loss": None},
        {**old, "iteration": 1203, "tokens": 90, "seconds": 1.5, "lm loss": None},
    ]
    page = render_page("run", Records([old, *odd], [], []), "")
    assert tile(page, "steps") == "1,203" and tile(page, "tokens") == "180"
    assert tile(page, "lm loss of step 1,203 alone") == "not finite"
    assert tile(page, "tokens/s, median of steps") == "45" and tile(page, "in steps") == "0:00:02"
    assert "log line" not in page and "best validation" not in page
    bare = render_page("run", Records([old], [], []), "")
    assert "median" not in bare and tile(bare, "tokens") == "0"
    timed = render_page("run", Records([{**old, "seconds": 2.0}], [], []), "")
    assert "median" not in timed and tile(timed, "in steps") == "0:00:02"
    back = render_page("run", Records([{**old, "seconds": -5.0}], [], []), "")
    assert tile(back, "in steps") == "0:00:00"


def test_starts_without_a_layout_or_a_fact_are_shown():
    unknown = {"kind": "event", "event": "start", "iteration": 1, "torch": "2.13.0"}
    page = render_page("run", Records(RECORDS.train, [], [START, unknown, AGAIN]), "")
    assert re.findall(r"<td>start</td><td>([^<]*)</td>", page) == [
        "1 rank",
        "",
        "new layout: 2 ranks, tp 2 (before: 1 rank)",
    ]
    facts = dict(re.findall(r"<tr><td>(torch|commit|layout)</td><td>([^<]*)</td></tr>", page))
    assert facts == {
        "torch": "2.13.0 → 2.14.0",
        "commit": "abc → unknown",
        "layout": "1 rank → unknown → 2 ranks, tp 2",
    }
    assert page.count("<th>") == 3  # of events
    first = render_page("run", Records(RECORDS.train, [], [unknown, START]), "")
    assert re.findall(r"<td>start</td><td>([^<]*)</td>", first) == ["", "1 rank"]


def test_the_page_loads_nothing_and_escapes_records():
    evil = "<script>alert('x')</script>"
    events = [{**START, "commit": evil}, {**RECORDS.events[-1], "reason": evil}]
    page = render_page(evil, Records(RECORDS.train, RECORDS.validation, events), evil)
    assert evil not in page and page.count("<script>") == 1
    addresses = re.findall(r"https?://[^\"'\s)]+", page)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=", page)


def test_the_status_of_a_run():
    def ending(**event):
        return run_status(Records(RECORDS.train, [], [START, {"iteration": 4, **event}]))

    assert ending(event="end", reason="SIGTERM") == "Stopped after step 4: SIGTERM."
    assert ending(event="start") == "Running or killed; the last recorded step is 4."
    assert run_status(Records([], [], [])) == "Running or killed; the last recorded step is 0."


def test_curves_omit_values_that_are_not_finite():
    assert finite_points(RECORDS.train, "lm loss") == [(1.0, 5.0), (2.0, 4.0), (4.0, 3.5)]
    assert finite_points(RECORDS.train, "grad_norm")[-1] == (4.0, 1.0)
    assert line_chart("nothing", [Curve("a", [])]) == ""
    assert render_page("empty", Records([], [], []), "").count("<svg") == 0


def test_points_are_at_their_values():
    figure = line_chart("t", [Curve("a", [(0.0, 0.0), (10.0, 10.0)])])
    first, last = re.search(r'points="([\d.]+,[\d.]+) ([\d.]+,[\d.]+)"', figure).groups()
    assert [float(v) for v in first.split(",")] == [58.0, 230.0]
    x, y = (float(v) for v in last.split(","))
    assert x == 540.0 and y == pytest.approx(12 + 218 * 0.5 / 10.5, abs=0.06)
    data = json.loads(re.search(r"data-chart='([^']*)'", figure)[1].replace("&quot;", '"'))
    assert data["lines"] == [{"name": "a", "style": "first", "points": [[0, 0], [10, 10]]}]


def data_of(figure):
    """Returns what the script of the page shows of a figure."""
    return json.loads(re.search(r"data-chart='([^']*)'", figure)[1].replace("&quot;", '"'))


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.0, 10.0], 0.0, 10.5),
        ([2.0, 12.0], 1.5, 12.5),
        ([0.1, 10.1], 0.0, 10.6),  # never below 0 without a negative value
        ([-1.0, 1.0], -1.1, 1.1),
        ([2.0, 2.0], 1.8, 2.2),
        ([-2.0, -2.0], -2.2, -1.8),
        ([0.0, 0.0], 0.0, 1.0),
    ],
)
def test_a_chart_has_a_margin_around_its_values(values, low, high):
    points = list(zip((3.0, 7.0), values, strict=True))
    found = data_of(line_chart("t", [Curve("a", points)]))
    assert found["y"] == pytest.approx([low, high, 230, 12])
    assert found["x"] == [3, 7, 58, 540]


def test_a_single_point_is_a_dot_and_has_a_range():
    figure = line_chart("t", [Curve("a", [(4.0, 1.0)])])
    assert data_of(figure)["x"] == [4, 5, 58, 540]
    middle = 230 - 218 * (1.0 - 0.9) / 0.2
    assert f'<circle class="first" cx="58.0" cy="{middle:.1f}" r="3"/>' in figure
    pair = [(4.0, 1.0), (6.0, 1.0)]
    assert "<circle" not in line_chart("t", [Curve("a", pair)])
    assert line_chart("t", [Curve("a", pair, dots=True)]).count("<circle") == 2


def test_marks_are_shown_from_the_first_step_to_the_last():
    points = [(10.0, 0.0), (20.0, 1.0)]
    figure = line_chart("t", [Curve("a", points)], marks=[9, 10, 15, 20, 21])
    places = re.findall(r'class="mark" x1="([\d.]+)" x2="([\d.]+)" y1="12" y2="230"', figure)
    assert places == [("58.0", "58.0"), ("299.0", "299.0"), ("540.0", "540.0")]
    assert re.findall(r"continued after (\d+)", figure) == ["10", "15", "20"]


def test_faint_curves_are_drawn_and_not_named():
    curves = [Curve("all", [(0.0, 1.0), (1.0, 2.0)], "faint"), Curve("mean", [(0.0, 1.5)])]
    figure = line_chart("t", [*curves, Curve("none", [])])
    assert [line["name"] for line in data_of(figure)["lines"]] == ["mean"]
    assert '<span class="legend"><span class="first">mean</span></span>' in figure
    assert figure.count("<polyline") == 2 and '<polyline class="faint"' in figure


def test_a_grid_is_labelled_at_its_values():
    figure = line_chart("t", [Curve("a", [(0.0, 0.0), (10.0, 10.0)])])
    rows = re.findall(r'<text x="52" y="([\d.]+)" dy="4" text-anchor="end">(\w+)</text>', figure)
    assert rows == [(f"{230 - 218 * value / 10.5:.1f}", str(value)) for value in (0, 5, 10)]
    columns = re.findall(r'<text x="([\d.]+)" y="250" text-anchor="middle">(\w+)</text>', figure)
    assert columns == [(f"{58 + 48.2 * step:.1f}", str(step)) for step in (0, 2, 4, 6, 8, 10)]
    lines = re.findall(r'class="grid" x1="58" x2="540" y1="([\d.]+)" y2="([\d.]+)"', figure)
    assert lines == [(y, y) for y, _ in rows]


@pytest.mark.parametrize(("last", "columns"), [(6.0, "0123456"), (7.0, "0246")])
def test_a_grid_has_about_five_rows_and_six_columns(last, columns):
    figure = line_chart("t", [Curve("a", [(0.0, 0.0), (last, 9.0)])])  # the margin ends at 9.45
    assert re.findall(r'text-anchor="end">(\w+)</text>', figure) == [*"02468"]
    assert re.findall(r'text-anchor="middle">(\w+)</text>', figure) == [*columns]


def test_downsampling_keeps_both_ends_of_each_interval():
    values = [3.0, 1.0, 2.0, 5.0, 4.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    points = [(float(step), value) for step, value in enumerate(values)]
    assert downsampled(points, 4) == [(1.0, 1.0), (3.0, 5.0), (5.0, 9.0)]
    assert downsampled(points, 10) == points
    assert len(downsampled(points, 9)) < 10
    many = [(float(step), float(step % 2)) for step in range(501)]
    assert downsampled(many[:500]) == many[:500] and len(downsampled(many)) < 500


def test_downsampling_keeps_spikes_and_order():
    points = [(float(i), math.sin(i / 500)) for i in range(20_000)]
    points[12_345] = (12_345.0, 99.0)
    kept = downsampled(points)
    assert len(kept) <= 520 and (12_345.0, 99.0) in kept
    assert kept == sorted(kept) and set(kept) <= set(points)
    assert downsampled(points[:10]) == points[:10]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.9, 3.4, [2.9, 3.0, 3.1, 3.2, 3.3, 3.4]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 5, [0, 1, 2, 3, 4, 5]),
        (3, 44, [10, 20, 30, 40]),
        (0, 19, [0, 5, 10, 15]),
        (7, 12, [7, 8, 9, 10, 11, 12]),
    ],
)
def test_ticks_are_round(low, high, expected):
    found = ticks(low, high, 5)
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found) and 3 <= len(found) <= 7
    assert found == pytest.approx(expected, abs=1e-12)


def test_numbers_are_short():
    values = (0, 0.003, 9999, 12_345, 1_500_000, 2e9, 3e12, 1e4, 1e6, 1e9, 1e12, -12_345, 123.456)
    assert [format_number(v) for v in values] == [
        "0",
        "0.003",
        "9999",
        "12.35k",
        "1.5M",
        "2G",
        "3T",
        "10k",
        "1M",
        "1G",
        "1T",
        "-12.35k",
        "123.5",
    ]


def test_the_command_writes_a_complete_page_or_none(tmp_path, capsys):
    lines = [json.dumps(r) for r in (START, *RECORDS.train, *RECORDS.validation)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "tra']))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Running or killed" in page and f"<h1>{tmp_path.name}</h1>" in page
    assert "<pre>not recorded</pre>" in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]
    (tmp_path / "config.yaml").write_text("model: {num_layers: 2}\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "<pre>model: {num_layers: 2}\n</pre>" in (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


def test_a_folder_without_metrics_gives_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "has no metrics.jsonl; give the --save folder of a run" in error
    assert error.count("\n") == 1
