"""Expressions and commands of launch scripts mean what they mean in Bash.

The cases are in the folder `launch_scripts`. `RUN` in them is a training command.
"""

import re
import shutil
from pathlib import Path

import pytest
from megatron_train.errors import TrainError
from megatron_train.megatron_lm.launch_script import read_script
from random_scripts import answers_of_bash

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

FOLDER = Path(__file__).parent / "launch_scripts"
SCRIPTS = {
    f"{name} {index}": text
    for name in ("words", "commands")
    for index, text in enumerate((FOLDER / f"{name}.txt").read_text().split("----\n"))
}
EXPRESSIONS = (FOLDER / "arithmetic.txt").read_text().splitlines()
CONDITIONS = (FOLDER / "conditions.txt").read_text().splitlines()
STATE = "P='[ab]' E= ONE=1 A=\n"
ENDS = {"no newline": "RUN a#b #c", "text": "RUN a <<END\nb", "&": "RUN &"}


def asked():
    """Returns all scripts by name: cases, and some that join many expressions or conditions."""
    tests = [f"if {each}\nthen A+=y; else A+=n; fi\n" for each in CONDITIONS]
    joined = {
        "expressions": f"RUN {' '.join(f'$(({each}))' for each in EXPRESSIONS)}\n",
        "conditions": STATE + "".join(tests) + "RUN $A\n",
    }
    return SCRIPTS | ENDS | joined


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Returns the words of the training command in Bash, and those that are read, by script."""
    folder = tmp_path_factory.mktemp("scripts")
    empty = folder / "empty"
    empty.mkdir()
    scripts = [(folder / f"{index}.sh", []) for index, _ in enumerate(asked())]
    for (path, _), text in zip(scripts, asked().values(), strict=True):
        path.write_text(re.sub(r"\bRUN\b", "python pretrain_gpt.py", text))
        path.with_name(path.name + ".words").write_text("\n")
    words = answers_of_bash(scripts, empty)
    return {
        name: (answer, path)
        for name, answer, (path, _) in zip(asked(), words, scripts, strict=True)
    }


def read(path):
    """Returns what the training command gets after the launcher, or None without one."""
    try:
        found = read_script(path, [], {"HOME": "/home/h"})
    except TrainError as error:
        print(error)
        return None
    return [*found.launcher[1:], found.program, *found.arguments]


@pytest.mark.parametrize("name", [*SCRIPTS, *ENDS])
def test_a_case_is_read_as_bash_runs_it(name, answers, monkeypatch):
    in_bash, path = answers[name]
    monkeypatch.chdir(path.parent / "empty")
    assert in_bash or name.startswith("commands")  # some of which start no training
    assert read(path) == in_bash, path.read_text()


def test_expressions_have_the_values_of_bash(answers):
    in_bash, path = answers["expressions"]
    assert dict(zip(EXPRESSIONS, read(path)[1:], strict=True)) == dict(
        zip(EXPRESSIONS, in_bash[1:], strict=True)
    )


def test_conditions_are_true_where_they_are_in_bash(answers):
    in_bash, path = answers["conditions"]
    assert dict(zip(CONDITIONS, read(path)[1], strict=True)) == dict(
        zip(CONDITIONS, in_bash[1], strict=True)
    )
