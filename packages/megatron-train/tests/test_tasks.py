"""Kinds of tasks, found by entry points."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from megatron_models import find_kind
from megatron_train import TaskKind, TrainError, find_task, task_kinds
from megatron_train.tasks import gpt, gpt_data


def installed(monkeypatch, *entries):
    """Let these entry points be all that is installed."""
    points = [EntryPoint(name, value, "megatron.tasks") for name, value in entries]
    monkeypatch.setattr("megatron_parallel.extensions.entry_points", lambda group: points)


def test_the_task_that_gpt_is_pretrained_for_is_installed():
    task = find_task(find_kind("gpt").default_task)
    assert task == task_kinds()["gpt"]
    assert (task.task, task.data) == (
        f"{gpt.__name__}:{gpt.gpt_task.__name__}",
        f"{gpt_data.__name__}:{gpt_data.GPTData.__name__}",
    )


def test_a_task_of_another_distribution_is_made_and_reads_by_its_own_functions(monkeypatch):
    theirs = ModuleType("theirs")
    theirs.MINE = TaskKind("mine", "for this test", "theirs:task", "theirs:data")
    theirs.task = theirs.data = lambda *given: given
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    installed(monkeypatch, ("mine", "theirs:MINE"))
    assert list(task_kinds()) == ["mine"]
    assert find_task("mine").build("run", ["stage"], None) == ("run", ["stage"], None)
    assert find_task("mine").open("run", "tokenizer") == ("run", "tokenizer")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("gtp", "a:B")], "no kind of task 'gpt'; did you mean 'gtp'.; installed are gtp"),
        ([("gpt", "json:loads")], "is json:loads, which is no TaskKind of that name"),
        ([("gpt", "json:nothing")], "is json:nothing, which cannot be imported"),
        ([("gpt", "a:B"), ("gpt", "c:D")], "two distributions bring the kind of task 'gpt'"),
    ],
)
def test_a_task_that_cannot_be_found_is_one_line(monkeypatch, entries, message):
    installed(monkeypatch, *entries)
    with pytest.raises(TrainError, match=message):
        find_task("gpt")


def test_kinds_of_tasks_are_looked_up_without_torch():
    code = "import sys; from megatron_train.tasks.kinds import find_task; find_task('gpt');"
    done = subprocess.run([sys.executable, "-c", f"{code} assert 'torch' not in sys.modules"])
    assert done.returncode == 0
