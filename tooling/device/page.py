"""The page of docs/ that shows the table of `nox -s device`."""

import json
from pathlib import Path
from typing import Final

from device.cases import JOBS

_TABLE: Final = Path(__file__).with_name("table.json")

_TEXT: Final = Path(__file__).with_name("page.md")

_COLUMNS: Final = ("waits", "blocking copies", "graph breaks", "kernels")
_BYTES: Final = {"element-wise GiB": "element-wise bytes", "peak GiB": "peak bytes"}


def render_device_page() -> str:
    """Returns the page."""
    table: dict[str, dict[str, int]] = json.loads(_TABLE.read_text(encoding="utf-8"))
    lines = [
        "| " + " | ".join(("job", *_COLUMNS, *_BYTES)) + " |",
        "|---|" + "---:|" * (len(_COLUMNS) + len(_BYTES)),
    ]
    for job in JOBS:
        row = table[job.name]
        counts = [f"{row[name]:,}" if name in row else "n/a" for name in _COLUMNS]
        sizes = [f"{row[name] / 2**30:,.2f}" for name in _BYTES.values()]
        lines.append("| " + " | ".join((job.name, *counts, *sizes)) + " |")
    return _TEXT.read_text(encoding="utf-8").format(table="\n".join(lines))
