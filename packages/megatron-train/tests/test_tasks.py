"""Kinds of tasks, which are found by entry points."""

import subprocess
import sys
from types import ModuleType

import pytest
from megatron_models import find_kind
from megatron_train import TaskKind, TrainError, find_task_kind, task_kinds
from megatron_train.tasks import gpt, gpt_data

from .test_configuration_extensions import installed


def test_the_default_task_of_gpt_is_installed():
    task = find_task_kind(find_kind("gpt").default_task)
    assert task == task_kinds()["gpt"]
    assert (task.task, task.data) == (
        f"{gpt.__name__}:{gpt.gpt_task.__name__}",
        f"{gpt_data.__name__}:{gpt_data.GPTData.__name__}",
    )
    assert "data.reset_attention_mask" in task.supported_settings
    assert "data.seq_length" not in task.supported_settings  # every task reads it


def test_a_task_of_another_distribution_uses_its_functions(monkeypatch):
    theirs = ModuleType("theirs")
    theirs.MINE = TaskKind("mine", "for this test", "theirs:task", "theirs:data")
    theirs.task = theirs.data = lambda *given: given
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    installed(monkeypatch, ("mine", "theirs:MINE"))
    assert list(task_kinds()) == ["mine"]
    assert find_task_kind("mine").build("run", ["stage"], None) == ("run", ["stage"], None)
    assert find_task_kind("mine").open_data("run", "tokenizer") == ("run", "tokenizer")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("gtp", "a:B")], "no kind of task 'gpt'; did you mean 'gtp'.; installed are gtp"),
        ([("gpt", "json:loads")], "is json:loads, which is not a TaskKind of that name"),
        ([("gpt", "json:nothing")], "is json:nothing, which cannot be imported"),
        ([("gpt", "a:B"), ("gpt", "c:D")], "two distributions provide the kind of task 'gpt'"),
    ],
)
def test_a_missing_task_gives_one_line(monkeypatch, entries, message):
    installed(monkeypatch, *entries)
    with pytest.raises(TrainError, match=message):
        find_task_kind("gpt")


def test_kinds_of_tasks_are_found_without_torch():
    code = (
        "import sys; from megatron_train.tasks.kinds import find_task_kind; find_task_kind('gpt');"
    )
    done = subprocess.run([sys.executable, "-c", f"{code} assert 'torch' not in sys.modules"])
    assert done.returncode == 0
