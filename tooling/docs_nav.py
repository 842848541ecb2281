"""A hook of MkDocs that adds the page of every family to the navigation."""

from pathlib import Path
from typing import Any

SECTION = "Families"


def on_config(config: Any) -> Any:
    """Appends the pages in docs/families to the section of families."""
    folder = Path(config["docs_dir"])
    (section,) = (each[SECTION] for each in config["nav"] if SECTION in each)
    for path in sorted((folder / "families").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        section.append({title: path.relative_to(folder).as_posix()})
    return config
