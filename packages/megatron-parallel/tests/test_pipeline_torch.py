"""What torch's schedules get of a step, print of an error, and hold of messages."""

import logging
import operator
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_parallel._compat.pipelining import StartedSends, run_schedule

LOGGER = logging.getLogger("torch.distributed.pipelining.schedules")


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What the schedules print."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    yield found
    LOGGER.removeHandler(handler)


class Schedule:
    """A schedule of torch that logs an error and may fail."""

    def __init__(self, log: list[Any], *, fails: bool) -> None:
        self.log, self.fails, self._internal_losses = log, fails, [torch.ones(1)]

    def _step_microbatches(self, *arguments: Any, **options: Any) -> None:
        self.log.append((*arguments, options))
        LOGGER.error("a whole schedule")
        if self.fails:
            raise KeyError("in the model")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_a_schedule_runs_micro_batches_as_they_are(
    records: list[logging.LogRecord], backward: bool, fails: bool
) -> None:
    log: list[Any] = []
    stage = SimpleNamespace(clear_runtime_states=lambda: log.append("clears"))
    schedule, batches = Schedule(log, fails=fails), (torch.ones(4), torch.ones(2))
    with pytest.raises(KeyError) if fails else nullcontext():
        run_schedule(schedule, [stage], batches, backward=backward)
    assert log[0] == log[2] == "clears" and len(log) == 3
    positional, named, targets, options = log[1]
    assert positional == [(), ()] and options == {"return_outputs": False}
    for given, batch in zip(named, batches, strict=True):
        assert list(given) == ["micro_batch"] and given["micro_batch"] is batch
    assert all(map(operator.is_, targets, batches))
    assert schedule._has_backward is stage.has_backward is backward  # type: ignore[attr-defined]
    assert schedule._internal_losses == []
    assert not records  # they would be printed beside the error that is raised
    LOGGER.error("another")
    assert [record.levelname for record in records] == ["ERROR"]


@pytest.mark.parametrize("at_once", [False, True])
def test_sent_tensors_are_dropped_when_their_sends_have_started(at_once: bool) -> None:
    sends, operations = StartedSends(at_once=at_once), [["a"], ["b", "c"]]
    assert all(sends.add(each) is each for each in operations)
    sends.before_receive()
    assert operations == ([[], []] if at_once else [["a"], ["b", "c"]])
    sends.drop()
    assert operations == [[], []]
    later = sends.add(["d"])
    assert later == ["d"] and operations == [[], []]
