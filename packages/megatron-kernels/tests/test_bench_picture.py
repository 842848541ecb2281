"""What the picture of a benchmark shows: roofs, points below them, and shares of the bound."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from megatron_kernels.bench import Measurement, Rates, Report
from megatron_kernels.roofline import write_roofline

figure_module = pytest.importorskip("matplotlib.figure")
GIGA = 1e9


def call(title: str, backend: str, products: float, moved: float, both: float) -> Measurement:
    bound = max(products / (100 * GIGA), moved / (10 * GIGA))
    return Measurement(title, backend, None, None, both / 3, both, products, moved, bound, True)


RATES = [Rates(10 * GIGA, 100 * GIGA), Rates(8 * GIGA, 90 * GIGA), Rates(12 * GIGA, 300 * GIGA)]
"""Medians 10 GB/s and 100 GFLOP/s, which meet at 10 operations for each byte."""
REPORTS: list[Report] = [
    (RATES[0], (call("wide", "slow", 4e9, 1e8, 0.08), call("wide", "fast", 4e9, 1e8, 0.05))),
    (RATES[1], (call("narrow", "fast", 4e7, 2e7, 0.004), Measurement("narrow", "no", "why", None))),
    (RATES[2], (call("moves", "slow", 0.0, 1e8, 0.02),)),
]


def drawn(reports: list[Report], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the figure that would be written, without rendering it."""
    figures: list[Any] = []
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda figure, path: figures.append((figure, path))
    )
    write_roofline(reports, Path("some.png"), "float32 on a device")
    ((figure, path),) = figures
    assert path == Path("some.png")
    return figure


def points(axes: Any) -> list[tuple[float, float]]:
    """Returns the positions of single points."""
    lines = (line.get_xydata() for line in axes.get_lines())
    return [(float(p[0][0]), float(p[0][1])) for p in lines if len(p) == 1]


def test_the_roofs_are_the_median_rates_and_meet_inside_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roof, _ = drawn(REPORTS, monkeypatch).axes
    curve = max((line.get_xydata() for line in roof.get_lines()), key=len)
    for x, y in curve:
        assert y == pytest.approx(min(100.0, 10.0 * x))
    intensities = [2.0, 10.0, 40.0]  # of the calls, and where the roofs meet
    assert curve[0][0] == pytest.approx(min(intensities) / 4)
    assert curve[-1][0] == pytest.approx(max(intensities) * 4)
    ratios = {round(b / a, 9) for (a, _), (b, _) in pairwise(curve)}
    assert len(ratios) == 1 and len(curve) > 100  # steps of one length on a logarithmic axis
    assert (roof.get_xscale(), roof.get_yscale()) == ("log", "log")
    title = "measured roofs: 100 GFLOP/s (product), 10.0 GB/s (copy)"
    assert roof.get_title() == title


def test_the_roofs_meet_inside_the_picture_if_all_calls_are_on_one_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for products, ends in ((1e11, (10 / 4, 1000 * 4)), (1e8, (1 / 4, 10 * 4)), (0.0, (1 / 4, 40))):
        reports = [(RATES[0], (call("one", "only", products, 1e8, 1.0),))]
        roof, _ = drawn(reports, monkeypatch).axes
        curve = max((line.get_xydata() for line in roof.get_lines()), key=len)
        assert (curve[0][0], curve[-1][0]) == pytest.approx(ends)


def test_calls_with_products_are_points_below_the_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    roof, _ = drawn(REPORTS, monkeypatch).axes
    # 4 GFLOP over 0.1 GB in 80 and 50 ms, and 0.04 GFLOP over 0.02 GB in 4 ms.
    assert sorted(points(roof)) == [
        (2.0, pytest.approx(10.0)), (40.0, pytest.approx(50.0)), (40.0, pytest.approx(80.0))
    ]  # fmt: skip
    labels = {each.get_text(): each for each in roof.texts}
    assert {name: each.xy for name, each in labels.items()} == {
        "narrow": (2.0, pytest.approx(10.0)),
        "wide": (40.0, pytest.approx(80.0)),  # at its fastest backend
    }
    # Towards the middle of the picture, 8.9 operations for each byte.
    assert (labels["narrow"].get_ha(), labels["wide"].get_ha()) == ("left", "right")
    assert labels["narrow"].xyann[0] > 0 > labels["wide"].xyann[0]
    # By their rates, in turn below and above their points.
    assert labels["narrow"].xyann[1] < 0 < labels["wide"].xyann[1]
    assert "floating-point operations" in roof.get_xlabel() and "GFLOP/s" in roof.get_ylabel()


def test_all_calls_have_a_row_with_their_share_of_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figure = drawn(REPORTS, monkeypatch)
    _, bars = figure.axes
    names = [each.get_text() for each in bars.get_yticklabels()]
    assert names == ["wide", "narrow", "moves"] and bars.yaxis_inverted()
    found = {(round(x, 6), y) for x, y in points(bars)}
    assert found == {(50.0, 0.0), (80.0, 0.0), (50.0, 1.0), (50.0, 2.0)}
    (line,) = (each for each in bars.get_lines() if len(each.get_xydata()) == 2)
    assert [x for x, _ in line.get_xydata()] == [100, 100]
    assert bars.get_xlim()[0] == 0 and bars.get_xlabel().endswith("(%)")
    assert figure.get_suptitle() == "float32 on a device"


def test_each_backend_has_one_style_and_one_entry_of_the_legend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"backend {number}" for number in range(23)]
    found = tuple(call("one", name, 1e9, 1e8, 0.1 + i) for i, name in enumerate(names))
    roof, bars = drawn([(RATES[0], found)], monkeypatch).axes
    legend = bars.get_legend()
    assert [each.get_text() for each in legend.get_texts()] == names
    styles = [(each.get_color(), each.get_marker()) for each in legend.get_lines()]
    assert len({*styles}) == len(styles)
    assert len({color for color, _ in styles}) == 10 and len({mark for _, mark in styles}) == 8
    for axes in (roof, bars):
        shown = [line for line in axes.get_lines() if len(line.get_xydata()) == 1]
        assert [(line.get_color(), line.get_marker()) for line in shown] == styles


def test_the_picture_grows_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = {}
    for count in (1, 40):
        found = tuple(call(f"call {i}", "only", 1e9, 1e8, 0.1) for i in range(count))
        figure = drawn([(RATES[0], found)], monkeypatch)
        roof, bars = (each.get_position() for each in figure.axes)
        heights[count] = [figure.get_figheight() * each.height for each in (roof, bars)]
    roofs, rows = zip(*heights.values(), strict=True)
    assert all(2.5 < each < 6 for each in roofs)  # inches
    assert rows[0] > 0.5 and 0.17 < rows[1] / 40 < 0.3  # enough for a line of text
