"""Runs whose host reads a step after the next one has begun, as on a GPU, compared with others."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import CheckpointStore
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import ProgressBar, Recorder
from megatron_train.errors import TrainError
from megatron_train.finiteness import UnreadStep
from megatron_train.metrics.console import Console
from megatron_train.metrics.records import read_records
from megatron_train.saving import Saver
from megatron_train.step_report import StepValues, UnreadReports
from megatron_train.trainer import Stop
from megatron_train.transfer import pack

from .test_accounting import report, spoil
from .test_trainer import Lines, Listener, weights


def behind(trainer):
    trainer._steps_behind = 1
    return trainer


class Late:
    """Values that arrive when the test says so."""

    def __init__(self, values):
        self.values, self.arrived, self.waits = values, False, 0

    def read(self):
        self.waits += not self.arrived
        return self.values


@pytest.fixture
def late(monkeypatch):
    """Makes all values of steps arrive late; returns them."""
    made = []
    monkeypatch.setattr(
        "megatron_train.step_report.HostCopy", lambda v: made.append(Late(v)) or made[-1]
    )
    return made


@pytest.mark.parametrize("bad", [(), (2, 5)])
def test_a_run_that_reads_late_is_the_same_run(make_trainer, bad):
    one, two = Listener(), Listener()
    plain = make_trainer(callbacks=[one])
    late = behind(make_trainer(callbacks=[two], check_for_nan=not bad))
    for trainer in (plain, late):
        trainer.micro_batches = spoil(trainer.micro_batches, bad)
        trainer.run()
    assert one.losses == pytest.approx(two.losses, rel=0, abs=0, nan_ok=True)
    assert [r.iteration - 1 for r in two.reports if not r.updated] == [*bad]
    assert torch.equal(weights(plain), weights(late))
    assert plain.state() == late.state()


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda", 1), ("meta", 1)])
def test_steps_are_read_late_on_devices_that_run_behind_the_host(make_trainer, device, count):
    engine = SimpleNamespace(mesh=SimpleNamespace(device=torch.device(device)))
    assert make_trainer(engine=engine, optimizer=None)._steps_behind == count


def test_all_steps_but_those_left_unread_are_read_at_once(make_trainer):
    check = make_trainer().finiteness
    for number in (1, 2, 3):
        values = StepValues({"lm loss": math.nan}, {"lm loss": 1.0}, math.nan, False, False)
        check.add(UnreadStep(number, values, [], {}), torch.tensor(True))
    counts = []
    for behind in (3, 1, 0):
        check.read(behind)
        counts.append(check.nan_steps)
    assert counts == [0, 2, 3]


@pytest.mark.parametrize(("ends", "count"), [(False, [0, 0]), (True, [0, 1])])
def test_a_loss_halts_a_run_only_if_it_is_read_late_and_ends(make_trainer, ends, count):
    check = make_trainer(check_for_nan=ends).finiteness
    assert [len(check.halting_loss(behind)) for behind in (0, 1)] == count
    assert not any(check.halting_loss(1))  # no step was wrong


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_ends_a_run_is_repeated_only_if_its_gradients_are_gone(make_trainer, late):
    trainer, numbers = make_trainer(check_for_nan=True), []
    if late:
        behind(trainer)
    run = trainer.engine.run
    trainer.engine.run = lambda *words: numbers.append(words[2]) or run(*words)
    trainer.micro_batches = spoil(trainer.micro_batches, {1})
    with pytest.raises(TrainError, match=r"^step 2: lm loss is inf; the gradient of 'weight'"):
        trainer.run()
    assert numbers == ([1, 2, 3, 2] if late else [1, 2])


@pytest.mark.parametrize("bad", [0, 2, 7])
def test_a_step_that_is_not_finite_ends_the_run_before_another_update(make_trainer, bad):
    good = make_trainer(train_iters=bad)
    good.run()
    trainer = behind(make_trainer(check_for_nan=True))
    trainer.micro_batches = spoil(trainer.micro_batches, {bad})
    with pytest.raises(TrainError, match=rf"^step {bad + 1}: lm loss is inf; the gradient of 'we"):
        trainer.run()
    assert trainer.iteration == min(bad + 2, 8)
    assert torch.equal(weights(trainer), weights(good))
    assert trainer.optimizer.steps == bad


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_saves_after_a_step_that_is_not_finite(make_trainer, rank):
    """Rank 0 would notice it when it asks for the state, which the other ranks do not."""
    saved, trainer = [], behind(make_trainer(check_for_nan=True))
    store = SimpleNamespace(save=lambda iteration, *_, **__: saved.append(iteration))
    saver = Saver(store, {}, None, 1, None, Console(silent=True))
    steps, mesh = spoil(trainer.micro_batches, {1})(0), trainer.engine.mesh
    for _ in range(2):
        trainer.step(steps)  # that the second one was not finite is not known yet
    parts = {name: getattr(mesh, name) for name in ("axis", "device", "layout")}
    trainer.engine.mesh = SimpleNamespace(rank=rank, **parts)
    with pytest.raises(TrainError, match=r"^step 2: lm loss is inf"):
        saver.on_step(trainer, SimpleNamespace(iteration=2))
    assert saved == []


def test_a_step_that_is_not_finite_is_not_saved(make_trainer, tmp_path):
    store = CheckpointStore(tmp_path)
    saver = Saver(store, {}, None, 1, None, Console(silent=True))
    trainer = behind(make_trainer(check_for_nan=True, callbacks=[saver]))
    trainer.task.migrated_config = lambda record: {}
    trainer.micro_batches = spoil(trainer.micro_batches, {2})
    with pytest.raises(TrainError, match=r"^step 3: lm loss is inf"):
        trainer.run()
    assert saver.newest is not None and saver.newest.iteration == 2


def test_skipped_steps_are_counted_late_and_end_the_run(make_trainer):
    trainer = behind(make_trainer(train_iters=100))
    trainer.micro_batches = spoil(trainer.micro_batches, range(3, 100))
    with pytest.raises(TrainError, match="no finite loss and gradient in 10 steps up to step 13;"):
        trainer.run()
    assert trainer.iteration == 14 and trainer.optimizer.scalars() == {
        "steps": 3,
        "skipped_steps": 11,
    }
    again = behind(make_trainer())
    again.step(spoil(again.micro_batches, {0})(0))
    assert again.state()["nan_steps"] == 1  # a checkpoint has the last step as well


def test_only_a_log_line_waits_for_values(make_trainer, tmp_path, late):
    console, trainer = Lines(), make_trainer()
    recorder = Recorder(tmp_path, {}, Console())
    bar = ProgressBar(Console(silent=True), 100, 6)
    lines = LogLine(console, 4, peak=None, listeners=[recorder.record_log_line])
    recorder.on_start(trainer)
    reports = [report(iteration) for iteration in range(1, 9)]
    for one in reports[:3]:
        for callback in (lines, recorder, bar):
            callback.on_step(trainer, one)
    assert not any(each.waits for each in late) and not console.lines
    late[0].arrived = True
    for callback in (lines, recorder, bar):
        callback.on_step(trainer, reports[3])
    assert [each.waits for each in late[:4]] == [0, 1, 1, 1] and len(console.lines) == 1
    recorder.on_end(trainer)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [step["iteration"] for step in records.train] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (lambda recorder, _: recorder.record_log_line(2, {"lm loss": 1.0}), "log"),
        (lambda recorder, _: recorder.record_validation(2, {"lm loss": 1.0}), "validation"),
        (lambda recorder, _: recorder.record_test(2, {"lm loss": 1.0}), "test"),
        (
            lambda recorder, trainer: recorder.on_listed_step(trainer, SimpleNamespace(samples=3)),
            "skip",
        ),
        (lambda recorder, trainer: recorder.on_end(trainer), "end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_records_follow_those_of_the_steps_before_them(record, kind, make_trainer, tmp_path, late):
    recorder, trainer = Recorder(tmp_path, {}, Console()), make_trainer()
    recorder.on_start(trainer)
    for iteration in (1, 2):
        recorder.on_step(trainer, report(iteration))
    record(recorder, trainer)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    kinds = [line.get("event", line["kind"]) for line in lines]
    assert kinds == ["start", "train", "train", kind]


def test_the_time_that_a_log_line_waits_belongs_to_its_steps(make_trainer, late, monkeypatch):
    clock = iter([100.0, 103.0])
    monkeypatch.setattr("megatron_train.callbacks.log_line.time.perf_counter", lambda: next(clock))
    lines = LogLine(Lines(), 1, peak=None)
    lines.on_step(make_trainer(), report(1, seconds=1.0))
    assert "elapsed time per iteration (ms): 4000.0 |" in lines._console.lines[0]


def test_a_saved_interval_has_the_steps_that_have_not_arrived(late, make_trainer):
    lines = LogLine(Lines(), 10, peak=None)
    for iteration in (1, 2, 3):
        lines.on_step(make_trainer(), report(iteration))
    late[0].arrived = True
    saved = lines.state()
    assert saved["sums"] == {"lm loss": 180.0, "z loss": 9.0}
    assert saved["denominators"] == {"lm loss": 90.0, "z loss": 120.0}


def test_reports_are_taken_in_order(late):
    unread = UnreadReports()
    reports = [report(iteration) for iteration in (1, 2, 3)]
    for one in reports:
        unread.add(one)
    late[1].arrived = True
    assert unread.take() == []  # the first has not arrived
    late[0].arrived = True
    assert unread.take() == reports[:2]
    assert unread.take() == [] and unread.take(wait=True) == reports[2:]


def test_values_are_packed_exactly():
    cpu = torch.device("cpu")
    numbers = [0.1, torch.tensor(7), torch.tensor(True), torch.tensor(0.2, dtype=torch.float64)]
    assert pack(numbers, cpu).tolist() == [0.1, 7.0, 1.0, 0.2]
    assert pack([1e300, 3], cpu).tolist() == [1e300, 3.0]
    counts = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([3.0]).double()}
    read = StepValues({"x": 1.0, "y": 2.0}, {"x": 3.0}, 4.0, True, False, counts).read
    assert (read.sums, read.denominators) == ({"x": 1.0, "y": 2.0}, {"x": 3.0})
    assert (read.grad_norm, read.updated, read.finite) == (4.0, True, False)
    assert read.counts == {"a": [1.0, 2.0], "b": [3.0]}


def test_numbers_on_the_device_are_not_sent_there(monkeypatch):
    cpu, sent = torch.device("cpu"), []
    monkeypatch.setattr("megatron_train.transfer.to_device", lambda v, d: sent.append(v) or v)
    assert pack([torch.tensor(1), torch.tensor(2.5)], cpu).tolist() == [1.0, 2.5] and not sent
    assert pack([], cpu).tolist() == [] and pack([1.5], cpu).tolist() == [1.5] and len(sent) == 2
    assert pack([torch.tensor(1), 2.5, torch.tensor(True)], cpu).tolist() == [1.0, 2.5, 1.0]
    assert sent[-1].tolist() == [0.0, 2.5, 0.0]


def test_a_stop_of_one_rank_is_read_one_step_later(make_trainer, monkeypatch):
    """The exchange of requests among two ranks, of which another one wants to stop."""
    trainer = behind(make_trainer())
    world, device = SimpleNamespace(size=2), trainer.engine.mesh.device
    trainer.engine.mesh = SimpleNamespace(device=device, axis=lambda name: world, is_imagined=False)
    wishes = iter([-1.0, -1.0, 143.0, 143.0])
    monkeypatch.setattr(
        "megatron_train.trainer.all_reduce", lambda t, *_, **__: t.fill_(next(wishes))
    )
    assert [trainer._all_stop() for _ in range(4)] == [False, False, False, True]
    assert trainer.stopped is not None and trainer.stopped.status == 143
    trainer.stop(Stop("--exit-interval 3", agreed=True))  # no exchange, and no later step
    assert trainer._all_stop()


@pytest.mark.parametrize(("status", "imagined"), [(0, False), (130, False), (130, True)])
def test_a_request_of_any_status_stops_ranks_that_exist(
    make_trainer, monkeypatch, status, imagined
):
    trainer, device = make_trainer(), torch.device("cpu")
    trainer.engine.mesh = SimpleNamespace(
        device=device, axis=lambda name: SimpleNamespace(size=2), is_imagined=imagined
    )
    monkeypatch.setattr("megatron_train.trainer.all_reduce", lambda t, *_, **__: t.fill_(status))
    assert trainer._all_stop() == (not imagined)
    stop = Stop("another rank received a request to stop", status)
    assert trainer.stopped == (None if imagined else stop)
