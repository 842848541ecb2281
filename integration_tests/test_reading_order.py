"""docs/reading-order.md names ten files that exist, teach what it says, and take an evening."""

import re
from pathlib import Path

from doc_pages import ROOT

PAGE = ROOT / "docs" / "reading-order.md"
EVENING = 2700
"""Lines that a reader gets through in an evening."""


def ten() -> list[tuple[Path, str]]:
    """Returns the ten files and what the page says that each teaches."""
    text = PAGE.read_text()
    short = re.search(r"`P` stands for `(.*)`", text)
    assert short
    rows = re.findall(r"^\| (\d+) \| `(.*?)` \| (.*?) \| .*\? \|$", text, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 11))
    return [(ROOT / re.sub("^P/", short[1] + "/", name), lesson) for _, name, lesson in rows]


def test_the_ten_files_hold_what_they_are_said_to_teach() -> None:
    for path, lesson in ten():
        text = path.read_text()
        for name in re.findall(r"`(\w+)`", lesson):
            assert re.search(rf"\b{name}\b", text), f"{path} does not name {name}"


def test_the_ten_files_take_an_evening() -> None:
    assert sum(len(path.read_text().splitlines()) for path, _ in ten()) <= EVENING


def test_every_question_has_an_answer_and_every_path_exists() -> None:
    text = PAGE.read_text()
    answers = re.findall(r"^(\d+)\. ", text.partition("## Answers")[2], flags=re.MULTILINE)
    assert [int(number) for number in answers] == list(range(1, 11))
    for name in re.findall(r"`(packages/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
