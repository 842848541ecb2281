"""Pictures in PNG: boxes are at their pixels, and bars have the lengths of their numbers."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron_parallel.imagined.storages import OTHER
from megatron_parallel.pipeline import Picture
from megatron_train.cli import main
from megatron_train.dry_run.picture import draw_memory
from megatron_train.dry_run.report import PARTS
from megatron_train.errors import TrainError
from megatron_train.metrics.plot import plot_losses
from megatron_train.metrics.records import Records
from megatron_train.report.picture import check_picture_path, write_picture

from .test_dry_run_report import FIRST, GIB, LAST

SMALL = (
    "dry-run gpt --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 2 --pipeline-model-parallel-size 2 --on cpu"
)

CLOSE = 1e-3  # the first of two dry runs has a tensor more


@pytest.fixture
def figures(monkeypatch):
    """Returns the figures that are saved, with their axes."""
    matplotlib = pytest.importorskip("matplotlib.figure")
    kept, save = [], matplotlib.Figure.savefig
    monkeypatch.setattr(
        matplotlib.Figure,
        "savefig",
        lambda figure, *a, **k: kept.append(figure) or save(figure, *a, **k),
    )
    return kept


def test_boxes_of_a_schedule_are_at_their_pixels(tmp_path, figures):
    image = pytest.importorskip("matplotlib.image")
    size = {"width": 20, "height": 10}
    boxes = [
        SimpleNamespace(x=0, y=0, fill="#ff0000", **size),
        SimpleNamespace(x=80, y=30, fill="#0000ff", **size),
    ]
    texts = [
        SimpleNamespace(x=50, y=20, text="x", size=12, anchor="middle"),
        SimpleNamespace(x=60, y=4, text="y", size=25, anchor="start"),
    ]
    write_picture(Picture(100, 40, boxes, texts), tmp_path / "a.png")
    pixels = (image.imread(tmp_path / "a.png")[..., :3] * 255).round().astype(int)
    assert pixels.shape == (60, 150, 3)  # 1.5 for each unit
    for color, rows, columns in (
        ([255, 0, 0], (0, 14), (0, 29)),
        ([0, 0, 255], (45, 59), (120, 149)),
    ):
        where = np.argwhere((pixels == color).all(-1))
        assert (where.min(0), where.max(0)) == (
            pytest.approx([rows[0], columns[0]]),
            pytest.approx([rows[1], columns[1]]),
        )
    shown = figures[0].axes[0].texts
    assert [(text.get_position(), text.get_text()) for text in shown] == [
        ((50, 20), "x"),
        ((60, 4), "y"),
    ]
    assert [text.get_fontsize() for text in shown] == pytest.approx([12 * 0.72, 25 * 0.72])
    assert [text.get_ha() for text in shown] == ["center", "left"]


def test_bars_of_memory_are_those_of_the_report(tmp_path, figures, capsys, monkeypatch):
    monkeypatch.setattr("megatron_train.cli.dry_run._processes", lambda: 1)
    assert main([*SMALL.split(), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["of_ranks"]
    assert main([*SMALL.split(), "--output", str(tmp_path / "memory.png")]) == 0
    parts, files = figures[0].axes
    bars = [(bar.get_x(), bar.get_width()) for each in parts.containers for bar in each]
    ends = [x + width for x, width in bars]
    peaks = [rank["peak"] / 2**30 for rank in ranks]
    assert ends[-len(ranks) :] == pytest.approx(peaks, rel=CLOSE)
    assert [x for x, _ in bars] == pytest.approx(
        [0.0] * len(ranks) + ends[: -len(ranks)], rel=CLOSE
    )
    assert parts.get_xlim() == pytest.approx((0, 1.12 * max(peaks)), rel=CLOSE)
    assert [text.get_position() for text in parts.texts] == [
        pytest.approx((peak, row), rel=CLOSE) for row, peak in enumerate(peaks)
    ]
    assert [label.get_text() for label in parts.get_yticklabels()] == [
        f"rank {rank['rank']}\n(pipeline rank {number})" for number, rank in enumerate(ranks)
    ]
    largest = max(ranks, key=lambda rank: rank["peak"])
    by_file = {}
    for entry in largest["at_peak"]:
        if entry["part"] in files.get_xlabel():
            name = entry["line"].partition(":")[0]
            by_file[name] = by_file.get(name, 0) + entry["bytes"]
    widths = [bar.get_width() * 2**30 for bar in files.containers[0]]
    assert widths == pytest.approx(sorted(by_file.values(), reverse=True)[:5], rel=CLOSE)
    assert f"rank {largest['rank']} at the peak" in files.get_xlabel()
    for axes in (parts, files):
        assert axes.yaxis_inverted()


@pytest.mark.parametrize(("trained", "evaluated"), [(3, 2), (3, 0), (0, 2), (0, 0)])
def test_losses_have_a_curve_a_mean_and_a_legend(trained, evaluated, tmp_path, figures):
    train = [{"iteration": i, "lm loss": 4.0 - i} for i in range(trained)]
    validation = [{"iteration": 10 * i, "lm loss": 3.0} for i in range(evaluated)]
    lost = {"iteration": 99, "lm loss": None}
    plot_losses(Records([*train, lost], [*validation, lost], []), "lm loss", tmp_path / "loss.png")
    axes = figures[0].axes[0]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    curve = (list(range(trained)), [4.0 - i for i in range(trained)])
    expected = [curve, curve] if trained else []  # the mean of one value is the value
    expected += [([0, 10], [3.0, 3.0])] if evaluated else []
    assert drawn == expected
    labels = ["train"] * bool(trained) + ["validation"] * bool(evaluated)
    legend = axes.get_legend()
    assert ([text.get_text() for text in legend.texts] if legend else []) == labels
    texts = axes.get_xlabel(), axes.get_ylabel(), axes.get_title()
    assert texts == ("step", "lm loss (nats per token)", "lm loss by step")


@pytest.fixture
def unsaved(monkeypatch):
    """Returns the figures that are saved, and their formats, without drawing them."""
    matplotlib, kept = pytest.importorskip("matplotlib.figure"), []

    def savefig(figure, path, **options):
        kept.append((figure, options["format"]))
        path.write_bytes(b"")

    monkeypatch.setattr(matplotlib.Figure, "savefig", savefig)
    return kept


def bars(axes):
    """Returns ends of the bars of each kind in GiB: from where to where."""
    return [
        [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in each] for each in axes.containers
    ]


def test_memory_is_drawn_by_part_and_by_file(tmp_path, unsaved):
    draw_memory(SimpleNamespace(layout="two ranks"), [LAST, FIRST], tmp_path / "a.svg")
    ((figure, kind),) = unsaved
    assert kind == "svg" and [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    assert figure.get_suptitle() == "Memory of a step: two ranks"
    parts, files = figure.axes
    assert bars(parts) == [[ends] * 2 for ends in ((0, 1), (1, 1.25), (1.25, 3.25), (3.25, 5))]
    assert [text.get_text() for text in parts.texts] == [" 4.0 GiB", " 5.0 GiB"]
    assert [text.get_position() for text in parts.texts] == [(5, 0), (5, 1)]
    assert parts.get_xlim() == pytest.approx((0, 5.6)) and parts.get_xlabel() == "GiB at the peak"
    assert [text.get_text() for text in parts.get_legend().texts] == [*PARTS]
    assert [label.get_text() for label in parts.get_yticklabels()] == [
        "rank 2048\n(pipeline rank 1)",
        "rank 0\n(pipeline rank 0)",
    ]
    colors = [each[0].get_facecolor() for each in parts.containers]
    assert len(set(colors)) == 4
    assert {bar.get_facecolor() for bar in files.containers[0]} == {colors[-1]}
    assert bars(files) == [[(0, 1.25), (0, 0.5)]]
    assert [label.get_text() for label in files.get_yticklabels()] == ["mlp.py", "norm.py"]
    assert files.get_xlabel() == f"GiB of {OTHER} on rank 0 at the peak, by file"
    for axes in (parts, files):
        assert axes.yaxis_inverted()
        shown = {side: spine.get_visible() for side, spine in axes.spines.items()}
        assert shown == {"left": True, "bottom": True, "top": False, "right": False}


def test_the_five_largest_files_are_drawn_with_all_their_lines(tmp_path, unsaved):
    held = {(OTHER, f"f{n}.py:{line}"): n * GIB for n in range(1, 8) for line in (1, 2)}
    use = replace(FIRST, at_peak=held | {("parameters", "f9.py:1"): 99 * GIB})
    draw_memory(SimpleNamespace(layout=""), [use], tmp_path / "a.png")
    ((figure, kind),) = unsaved
    _, files = figure.axes
    assert kind == "png" and bars(files) == [[(0, 2 * n) for n in (7, 6, 5, 4, 3)]]


def test_each_rank_makes_a_picture_of_memory_higher_by_the_same(tmp_path, unsaved):
    for count in (1, 2, 4):
        draw_memory(SimpleNamespace(layout=""), [FIRST] * count, tmp_path / "a.svg")
    sizes = [tuple(figure.get_size_inches()) for figure, _ in unsaved]
    widths, (one, two, four) = {width for width, _ in sizes}, [height for _, height in sizes]
    assert len(widths) == 1 and 0 < two - one < one
    assert four - two == pytest.approx(2 * (two - one))


@pytest.mark.parametrize(("steps", "near"), [(99, {50}), (100, {49, 50, 51})])
def test_a_curve_of_losses_is_drawn_faintly_below_its_mean(tmp_path, unsaved, steps, near):
    """The mean covers a hundredth of all steps on either side."""
    train = [{"iteration": n, "lm loss": 9.0 * (n == 50)} for n in range(1, steps + 1)]
    plot_losses(Records(train, [], []), "lm loss", tmp_path / "loss.png")
    ((figure, _),) = unsaved
    each, mean = figure.axes[0].lines
    assert 0 < each.get_alpha() < 0.5 and mean.get_alpha() is None
    assert 0 < each.get_linewidth() < mean.get_linewidth()
    assert list(each.get_ydata()) == [step["lm loss"] for step in train]
    found = dict(zip(mean.get_xdata(), mean.get_ydata(), strict=True))
    assert {n: loss for n, loss in found.items() if loss} == dict.fromkeys(near, 9.0 / len(near))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", r"a\.pdf: the file name must end in \.svg or \.png$"),
        ("a", "a: the file name must end in"),
        ("none/a.svg", r"none/a\.svg: the folder none does not exist; create it$"),
        ("a.svg", ""),
        ("a.png", ""),
    ],
)
def test_a_picture_is_of_a_known_format_in_a_folder_that_exists(
    name, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    refused = pytest.raises(TrainError, match=f"^--output {message}") if message else nullcontext()
    with refused:
        check_picture_path(Path(name))
