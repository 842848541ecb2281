"""Writes pictures of schedules: SVG text as it is, PNG drawn by matplotlib."""

from pathlib import Path

from megatron_parallel.pipeline import Picture

from megatron_train.atomic_write import write_atomically
from megatron_train.errors import TrainError

_FORMATS = (".svg", ".png")


def check_picture_path(path: Path) -> None:
    """Raises `TrainError` unless a picture can be written to the path."""
    if path.suffix not in _FORMATS:
        raise TrainError(f"--output {path}: the file name must end in {' or '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise TrainError(f"--output {path}: the folder {path.parent} does not exist; create it")


def write_picture(picture: Picture, path: Path) -> None:
    """Writes ``picture`` to ``path`` in the format of the file name's suffix."""
    with write_atomically(path) as temporary:
        if path.suffix == ".svg":
            temporary.write_text(picture.svg(), encoding="utf-8")
        else:
            _write_png(picture, temporary)


def _write_png(picture: Picture, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(picture.width / 100, picture.height / 100), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")
    for box in picture.boxes:
        axes.add_patch(
            Rectangle((box.x, box.y), box.width, box.height, facecolor=box.fill, linewidth=0)
        )
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for text in picture.texts:
        points = text.size * 72 / 100  # the figure has 100 pixels per inch
        axes.text(
            text.x,
            text.y,
            text.text,
            fontsize=points,
            ha=anchors[text.anchor],
            va="center_baseline",
        )
    figure.savefig(path, format="png")
