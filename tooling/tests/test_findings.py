"""Every script in findings/ has the form that its README states, and a row in the table."""

import re

import pytest
from doc_pages import ROOT

FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
FORM = {
    "strict mode": r"^set -euo pipefail$",
    "a temporary folder": r"mktemp -d",
    "removal of the folder": r"^trap 'rm -rf ",
    "pinned packages": r"==\d",
    "the package": r"^# Package: +\S",
    "the guess": r"^# Guess: +\S",
    "the behaviour": r"^# Behaviour: +\S",
    "the date": r"20\d\d-\d\d-\d\d",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("part", FORM)
def test_a_finding_has_its_form(script, part):
    assert re.search(FORM[part], script.read_text(), flags=re.MULTILINE), f"{script} lacks {part}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_finding_runs_without_this_project(script):
    assert not re.search(
        r"megatron[_-](data|models|train|ckpt|infer|kernels|optim|parallel)", script.read_text()
    )


def test_the_table_lists_the_scripts():
    rows = re.findall(
        r"^\| `([\w.-]+\.sh)` \| \S+ [\d.]+", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert rows == [path.name for path in SCRIPTS]
