"""The checks of words notice what CONTRIBUTING.md excludes, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
from check_words import AVOIDED, complaints

ROOT = Path(__file__).parents[2]


def written(folder: Path, name: str, text: str) -> list[str]:
    """Returns the complaints about a file with the given text."""
    file = folder / Path(name).name
    file.write_text(text)
    return complaints(file, name)


@pytest.mark.parametrize("word", AVOIDED)
def test_an_avoided_word_is_reported_with_its_line(word, tmp_path):
    broken = word.capitalize().replace(" ", "\n")
    for form in (word, broken, f"_{word}_"):
        (line,) = written(tmp_path, "docs/a.md", f"Text.\n\nIt is {form}.\n")
        assert line == f"docs/a.md:3: {word!r}: write {AVOIDED[word]}"
    assert not written(tmp_path, "docs/a.md", f"x{word} {word}x\n")
    assert not written(tmp_path, "CONTRIBUTING.md", word)


def test_a_name_with_an_avoided_word_is_reported(tmp_path):
    (line,) = written(tmp_path, "packages/p/tests/a.py", "x = 1\nwas_told = x\n")
    assert line.startswith("packages/p/tests/a.py:2: 'told'")


@pytest.mark.parametrize(
    ("docstring", "wrong"),
    [
        ("Returns a number.", False),
        ("Reads, then writes.", False),
        ("Return a number.", True),
        ("The number.", True),
        ("returns a number.", True),
    ],
)
def test_a_docstring_starts_with_a_verb_in_the_third_person(docstring, wrong, tmp_path):
    text = f'"""Module."""\n\n\ndef f():\n    """{docstring}"""\n'
    found = written(tmp_path, "packages/p/src/p/a.py", text)
    first = docstring.split()[0]
    message = f"packages/p/src/p/a.py:5: f: starts with {first!r}, not with a verb (Returns)"
    assert found == ([message] if wrong else [])
    assert not written(tmp_path, "packages/p/tests/a.py", text)


def test_properties_classes_and_functions_without_docstring_need_no_verb(tmp_path):
    text = (
        'class A:\n    """A thing."""\n\n    @property\n    def b(self):\n'
        '        """The number."""\n\n    def c(self):\n        return 1\n'
    )
    assert not written(tmp_path, "packages/p/src/p/a.py", text)
    text = text.replace("@property", "@functools.cache")
    assert len(written(tmp_path, "packages/p/src/p/a.py", text)) == 1


def test_rows_of_tables_in_changelogs_may_have_old_names(tmp_path):
    text = "# Changelog\n\n| old | new |\n|---|---|\n| told | named |\n"
    assert not written(tmp_path, "packages/p/CHANGELOG.md", text)
    assert len(written(tmp_path, "packages/p/README.md", text)) == 1
    (line,) = written(tmp_path, "packages/p/CHANGELOG.md", f"{text}\n- It was told.\n")
    assert line.startswith("packages/p/CHANGELOG.md:7: ")


def test_contributing_has_the_same_words():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| not | but |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    listed = {word: better for words, better in rows for word in words.split(", ")}
    assert listed == {word: better.replace("...", "…") for word, better in AVOIDED.items()}


def test_the_program_prints_complaints_and_fails(tmp_path):
    program = tmp_path / "tooling" / "check_words.py"
    program.parent.mkdir()
    program.write_bytes((ROOT / "tooling" / "check_words.py").read_bytes())
    planted = tmp_path / "planted.md"
    for text, status, printed, error in (
        ("No rank knows.\n", 0, "\n", ""),
        (
            "Nobody knows.\n",
            1,
            "planted.md:1: 'nobody': write no rank, no process, nothing\n",
            "1 complaints; the words are explained in CONTRIBUTING.md\n",
        ),
    ):
        planted.write_text(text)
        done = subprocess.run(
            [sys.executable, program, planted], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout, done.stderr) == (status, printed, error)
