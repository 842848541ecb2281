"""Files, lines and progress bars of the callbacks of a run."""

import io
import json
import math
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron_train.callbacks import evaluation
from megatron_train.callbacks.log_line import IntervalSums, LogLine
from megatron_train.callbacks.recording import ProgressBar, Recorder, TensorBoard
from megatron_train.callbacks.stopping import StopAt, StopOnSignal
from megatron_train.engine import BatchTotals
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.metrics.environment import environment
from megatron_train.metrics.peak import Peak
from megatron_train.metrics.records import read_records
from megatron_train.step_report import StepReport, StepValues
from megatron_train.trainer import Stop

REPORT = StepReport(
    iteration=2,
    consumed_samples=12,
    values=StepValues({"lm loss": 30.0}, {"lm loss": 10.0}, 1.5, updated=True, finite=True),
    learning_rate=0.25,
    seconds=0.5,
    samples=6,
    tokens=48,
    flops=4e12,
)
NAN = replace(
    REPORT,
    values=StepValues({"lm loss": math.nan}, {"lm loss": 10.0}, math.nan, False, False),
    seconds=1.5,
)


class Screen(Console):
    """A console that records its lines and the calls of its bar."""

    def __init__(self):
        super().__init__()
        self.lines, self.bar = [], []

    def print_line(self, text):
        self.lines.append(text)

    def start_bar(self, total_tokens, done_tokens):
        self.bar.append((total_tokens, done_tokens))

    def advance_bar(self, tokens, postfix):
        self.bar.append((tokens, postfix))

    def stop_bar(self):
        self.bar.append("stopped")


def at(iteration, train_iters=4, **more):
    """Returns a mock trainer at a step, whose evaluations return the given losses."""
    return SimpleNamespace(
        iteration=iteration,
        train_iters=train_iters,
        consumed_samples=6 * iteration,
        stopped=None,
        evaluate=lambda batches: {"lm loss": float(len(list(batches)))},
        engine=SimpleNamespace(mesh=SimpleNamespace(rank=0, world_size=2)),
        task=SimpleNamespace(losses=("lm loss",), metrics=()),
        evaluates_averages=False,
        **more,
    )


def test_an_interval_starts_empty_and_adds_every_step():
    interval = IntervalSums()
    assert vars(interval) == {
        **dict.fromkeys(("steps", "skipped", "nan", "tokens"), 0),
        **dict.fromkeys(("seconds", "flops"), 0.0),
        **{name: {} for name in ("sums", "denominators", "counts")},
    }
    for report in (REPORT, NAN, REPORT):
        interval.add(report)
    assert (interval.steps, interval.skipped, interval.nan) == (3, 1, 1)
    assert (interval.seconds, interval.tokens, interval.flops) == (2.5, 144, 12e12)
    assert interval.losses(None) == {"lm loss": 3.0}
    alone = IntervalSums()
    alone.add(NAN)
    assert math.isnan(alone.losses(None)["lm loss"])


def test_an_interval_adds_counts_of_finite_steps():
    def counted(values, finite=True):
        counts = {name: torch.tensor(each).double() for name, each in values.items()}
        return replace(
            REPORT, values=StepValues({"lm loss": 1.0}, {"lm loss": 1.0}, 1.0, True, finite, counts)
        )

    interval = IntervalSums()
    interval.add(counted({"layer 0": [1.0, 2.0, 3.0]}))
    interval.add(counted({"layer 0": [5.0, 5.0, 5.0]}, finite=False))
    interval.add(counted({"layer 0": [10.0, 20.0, 30.0], "layer 2": [7.0]}))
    assert interval.counts == {"layer 0": [11.0, 22.0, 33.0], "layer 2": [7.0]}
    first, second = (LogLine(Screen(), 10, peak=None) for _ in range(2))
    first.on_step(at(1), counted({"layer 0": [1.0, 2.0]}))
    second.load_state(json.loads(json.dumps(first.state())))
    second.on_step(at(2), counted({"layer 0": [3.0, 4.0], "layer 1": [5.0]}))
    assert second.state()["counts"] == {"layer 0": [4.0, 6.0], "layer 1": [5.0]}
    for damaged in (5, [1.0, "2"], [1], "no", None):
        with pytest.raises(TrainError, match=r"damaged: the counts of 'layer 2' are "):
            second.load_state({**first.state(), "counts": {"layer 0": [1.0], "layer 2": damaged}})


def test_a_log_line_gives_the_figures_of_its_interval_per_device():
    console, calls = Screen(), []
    lines = LogLine(
        console, 2, peak=Peak(8e12, ""), throughput=True, listeners=[lambda *a: calls.append(a)]
    )
    lines.on_step(at(1), replace(REPORT, iteration=1))
    assert not console.lines
    lines.on_step(at(2), REPORT)
    (line,) = console.lines
    for text in (
        *("iteration        2/       4", "consumed samples:           12", "(ms): 500.0"),
        *("learning rate: 2.500000E-01", "global batch size:     6", "grad norm: 1.500"),
        *("(TFLOP/s/GPU): 4.0", "tokens/s: 96.0", "MFU: 50.0 %", "lm loss: 3.000000E+00"),
    ):
        assert f"{text} |" in line
    assert calls == [(2, {"lm loss": 3.0})]
    lines.on_step(at(3), replace(REPORT, iteration=3))
    assert lines.state() == {
        "skipped": 0,
        "nan": 0,
        "sums": {"lm loss": 30.0},
        "denominators": {"lm loss": 10.0},
    }


def test_the_recorder_writes_steps_evaluations_and_events(tmp_path):
    recorder = Recorder(tmp_path, {"seed": 7}, Console())
    recorder.on_start(at(1))
    recorder.on_step(at(2), REPORT)
    assert len(read_records(tmp_path / "metrics.jsonl").train) == 1  # at once
    recorder.on_step(at(3), replace(NAN, iteration=3))
    recorder.record_log_line(3, {"lm loss": math.inf})
    recorder.record_validation(3, {"lm loss": 2.0})
    recorder.record_test(3, {"lm loss": 2.5})
    trainer = at(3)
    trainer.stopped = Stop("SIGTERM", 143)
    recorder.on_end(trainer)
    records = read_records(tmp_path / "metrics.jsonl")
    assert records.train == [
        {
            "kind": "train",
            "iteration": 2,
            "consumed_samples": 12,
            "lm loss": 3.0,
            "learning_rate": 0.25,
            "grad_norm": 1.5,
            "updated": True,
            "seconds": 0.5,
            "tokens": 48,
        },
        {
            "kind": "train",
            "iteration": 3,
            "consumed_samples": 12,
            "lm loss": None,
            "learning_rate": 0.25,
            "grad_norm": None,
            "updated": False,
            "seconds": 1.5,
            "tokens": 48,
        },
    ]
    assert records.log == [{"kind": "log", "iteration": 3, "lm loss": None}]
    assert records.validation == [{"kind": "validation", "iteration": 3, "lm loss": 2.0}]
    assert records.events == [
        {"kind": "event", "event": "start", "iteration": 1, "seed": 7},
        {"kind": "event", "event": "test", "iteration": 3, "lm loss": 2.5},
        {"kind": "event", "event": "end", "iteration": 3, "reason": "SIGTERM"},
    ]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="closed"):
        recorder.record_test(3, {"lm loss": 2.5})


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device", "loss.png")])
def test_the_plot_shows_the_first_loss_and_a_full_disk_is_a_warning(
    tmp_path, monkeypatch, capsys, error
):
    drawn = []

    def plot(records, loss, path):
        drawn.append((len(records.train), loss, path))
        if error is not None:
            raise error

    monkeypatch.setattr("megatron_train.callbacks.recording.plot.plot_losses", plot)
    recorder = Recorder(tmp_path, {}, Console())
    recorder.on_start(at(1))
    pair = {"lm loss": 30.0, "z loss": 4.0}, {"lm loss": 10.0, "z loss": 2.0}
    recorder.on_step(at(2), replace(REPORT, values=StepValues(*pair, 1.5, True, True)))
    recorder.on_end(at(2))
    assert drawn == [(1, "lm loss", tmp_path / "loss.png")]
    words = "megatron-train: warning: loss.png is not drawn: loss.png: No space left on device\n"
    assert capsys.readouterr().err == ("" if error is None else words)


def test_tensorboard_drops_repeated_steps(tmp_path, monkeypatch):
    made, scalars = [], {}

    class Writer:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            scalars[name, step] = value

        def close(self):
            made.append("closed")

    monkeypatch.setattr("megatron_train.callbacks.recording.EventFile", Writer)
    board = TensorBoard(tmp_path, 2)
    board.on_start(at(1))
    board.on_step(at(2), REPORT)
    board.on_step(at(3), replace(REPORT, iteration=3))
    board.write_validation(3, {"lm loss": 100.0})
    board.write_validation(4, {"lm loss": 2.0, "z loss": 20.5})
    board.on_end(at(3))
    assert made == [(tmp_path, 2), "closed"]
    assert scalars == {
        ("lm loss", 2): 3.0,
        ("learning-rate", 2): 0.25,
        ("grad-norm", 2): 1.5,
        ("batch-size", 2): 6.0,
        ("tokens-per-second", 2): 96.0,
        ("lm loss validation", 3): 100.0,
        ("lm loss validation ppl", 3): math.exp(20.0),
        ("lm loss validation", 4): 2.0,
        ("lm loss validation ppl", 4): math.exp(2.0),
        ("z loss validation", 4): 20.5,
        ("z loss validation ppl", 4): math.exp(20.0),
    }


def test_progress_counts_tokens_of_all_samples():
    console = Screen()
    progress = ProgressBar(console, samples=24, tokens_per_sample=8)
    progress.on_start(at(1))
    progress.on_step(at(2), REPORT)
    progress.on_listed_step(at(3), BatchTotals(samples=2, tokens=16, flops=1.0))
    progress.on_end(at(3))
    shown = "step 2, lm loss 3.000"
    assert console.bar == [(192, 48), (48, shown), (16, shown), "stopped"]


def test_bars_and_lines_need_rank_0_and_a_terminal(capsys):
    out = io.StringIO()
    console = Console(out)
    console.start_bar(100, 10)
    console.advance_bar(5, "step 1")
    assert console._bar.n == 10  # disabled, since stderr is not a terminal
    console.stop_bar()
    assert console._bar is None
    console.print_line("one")
    console.warn("two")
    silent = Console(out, silent=True)
    silent.print_line("three")
    silent.warn("four")
    assert out.getvalue() == "one\n"
    assert capsys.readouterr().err == "megatron-train: warning: two\n"


def test_the_bar_counts_thousands_of_tokens(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    console = Console()
    console.start_bar(100_000, 10_000)
    console.advance_bar(5_000, "step 1")
    console._bar.refresh()
    console.stop_bar()
    last = terminal.getvalue().split("\r")[-2]
    assert last.startswith("training:  15%") and "15.0k/100k" in last and "step 1" in last


@pytest.mark.parametrize(("iteration", "due"), [(2, False), (3, True), (4, True)])
def test_evaluations_come_at_intervals_and_at_the_end_and_the_test_at_the_end(iteration, due):
    console, calls = Screen(), []
    report = replace(REPORT, iteration=iteration)
    for kind, more in ((evaluation.Evaluation, (3,)), (evaluation.TestSetEvaluation, ())):
        callback = kind(console, lambda: ["batches"] * 5, *more, [lambda *a: calls.append(a)])
        callback.on_step(at(iteration), report)
    count = due + (iteration == 4)
    assert calls == [(iteration, {"lm loss": 5.0})] * count
    assert len(console.lines) == 3 * count
    assert any("on test set" in line for line in console.lines) == (iteration == 4)
    assert not any("averaged" in line for line in console.lines)
    console.lines.clear()
    trainer = at(iteration)
    trainer.evaluates_averages = True
    for kind, more in ((evaluation.TestSetEvaluation, ()), (evaluation.Evaluation, (4,))):
        kind(console, list, *more).on_step(trainer, replace(REPORT, iteration=4))
    for line, where in ((1, "4 on test set"), (4, "4")):
        start = f" validation loss at iteration {where} with averaged weights | "
        assert console.lines[line].startswith(start)


def test_a_run_stops_at_multiples_of_steps_and_after_minutes(monkeypatch):
    def stops(callback, iteration):
        found = []
        callback.on_step(SimpleNamespace(stop=found.append), replace(REPORT, iteration=iteration))
        return found

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    every, after = StopAt(3, None), StopAt(None, 1.5)
    assert [bool(stops(every, n)) for n in range(1, 7)] == [False, False, True] * 2
    now[0] += 89
    assert stops(after, 1) == []
    now[0] += 1
    assert stops(after, 1) == [Stop("--exit-duration-in-mins 1.5", 0, agreed=False)]
    assert stops(every, 6) == [Stop("--exit-interval 3", 0, agreed=True)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_first_signal_stops_after_the_step_and_a_second_immediately(rank, make_trainer, capfd):
    trainer = make_trainer()
    trainer.engine.mesh = SimpleNamespace(rank=rank)
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        assert trainer.stopped == Stop("SIGTERM", 128 + signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    message = "SIGTERM: stopping after this step; send it again to stop at once\n"
    assert capfd.readouterr().err == (message if rank == 0 else "")


def test_the_engine_gets_the_number_of_each_step(make_trainer):
    trainer, numbers = make_trainer(train_iters=3), []
    run = trainer.engine.run

    def noting(batches, denominators, iteration, *more):
        numbers.append(iteration)
        return run(batches, denominators, iteration, *more)

    trainer.engine.run = noting
    trainer.run()
    assert numbers == [1, 2, 3]
    assert (trainer.iteration, trainer.consumed_samples) == (3, 18)


def test_facts_of_a_run_are_plain_values_with_versions():
    facts = environment(torch.device("cpu"))
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__ and facts["megatron-train"]
    assert facts["device"].endswith("threads")
