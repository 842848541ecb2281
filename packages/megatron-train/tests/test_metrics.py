import errno
import io
import json
import math
import os
import re
import socket
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch
from megatron_train.atomic_write import write_atomically
from megatron_train.errors import TrainError
from megatron_train.metrics.append_only_file import AppendOnlyFile
from megatron_train.metrics.console import Console
from megatron_train.metrics.event_file import EventFile
from megatron_train.metrics.lines import TrainingLine, evaluation_lines
from megatron_train.metrics.peak import (
    Peak,
    assumed_cpu_peak,
    data_sheet_peak,
    device_peak,
    measured_peak,
)
from megatron_train.metrics.plot import plot_losses, running_mean
from megatron_train.metrics.records import Records, RecordWriter, read_records
from tensorboard.backend.event_processing import event_accumulator

NOW = datetime(2025, 1, 2, 3, 4, 5, 678)


def line(**changes):
    values = {
        "iteration": 20,
        "train_iters": 1000,
        "consumed_samples": 160,
        "milliseconds": 12.345,
        "learning_rate": 1.5e-4,
        "global_batch_size": 8,
        "losses": {"lm loss": 6.5},
        "grad_norm": 1.23456,
        "skipped": 0,
        "nan": 0,
        "tokens_per_second": 12345.67,
    }
    return TrainingLine(**{**values, **changes}).render(NOW)


def test_the_training_line_is_megatrons_with_our_fields_appended():
    assert line(mfu=0.25) == (
        " [2025-01-02 03:04:05.000678] iteration       20/    1000 |"
        " consumed samples:          160 |"
        " elapsed time per iteration (ms): 12.3 | learning rate: 1.500000E-04 |"
        " global batch size:     8 | lm loss: 6.500000E+00 | loss scale: 1.0 | grad norm: 1.235 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s: 12345.7 | MFU: 25.0 % |"
    )


def test_unknown_figures_are_absent_and_negative_losses_are_printed():
    assert "MFU" not in line()
    assert "lm loss: -1.000000E+00" in line(losses={"lm loss": -1.0})
    text = line(teraflops=3.21)
    assert "(ms): 12.3 | throughput per GPU (TFLOP/s/GPU): 3.2 | learning rate" in text


def test_numbers_of_gradients_and_layers_are_printed_if_they_are_known():
    worst = {"largest load": (1.23456, 3), "least entropy": (0.5, 0)}
    text = line(loss_scale=65536.0, num_zeros=7.0, params_norm=2.34567, worst_layers=worst, mfu=0.5)
    assert (
        " | loss scale: 65536.0 | grad norm: 1.235 | num zeros: 7.0 | params norm: 2.346 |" in text
    )
    assert text.endswith(
        "tokens/s: 12345.7 | MFU: 50.0 % | largest load: 1.235 (layer 3) | "
        "least entropy: 0.5 (layer 0) |"
    )
    assert "num zeros" not in line() and "params norm" not in line()
    assert "num zeros: 0.0 | params norm: 0.000" in line(num_zeros=0.0, params_norm=0.0)


def test_evaluation_lines_are_between_rules():
    rule, text, closing = evaluation_lines("iteration 5", {"lm loss": 1.0})
    assert text == (
        " validation loss at iteration 5 |"
        " lm loss value: 1.000000E+00 | lm loss PPL: 2.718282E+00 | "
    )
    assert rule == closing == "-" * (len(text) + 1)
    assert "PPL: 4.851652E+08" in evaluation_lines("x", {"lm loss": 100.0})[1]


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [  # as data sheets print them: "/ 2" stands for a figure with sparsity
        ("NVIDIA GB300", 360e3 / 72 / 2, 80),
        ("NVIDIA B300 SXM6 AC", 36e3 / 8 / 2, 600 / 8),
        ("NVIDIA GB200", 360e3 / 72 / 2, 5760 / 72),
        ("NVIDIA B200", 36e3 / 8 / 2, 600 / 8),
        ("NVIDIA GH200 480GB", 1979 // 2, 67),
        ("NVIDIA H200", 1979 // 2, 67),
        ("NVIDIA H200 NVL", 1671 // 2, 60),
        ("NVIDIA H100 PCIe", 1513 // 2, 51),
        ("NVIDIA H100 NVL", 1671 // 2, 60),
        ("NVIDIA H100 80GB HBM3", 1979 // 2, 67),
        ("NVIDIA H800", 1979 // 2, 67),
        ("NVIDIA H20", 148, 44),
        ("NVIDIA A100-SXM4-80GB", 624 / 2, 19.5),
        ("NVIDIA A800-SXM4-80GB", 624 / 2, 19.5),
        ("NVIDIA A40", 299.4 / 2, 37.4),
        ("NVIDIA A30", 330 / 2, 10.3),
        ("NVIDIA L40S", 362.05 // 1, 91.6),
        ("NVIDIA L40", 181.05 // 1, 90.5),
        ("NVIDIA L4", 242 / 2, 30.3),
        ("AMD Instinct MI300X", 2614.9 // 2, 163.4),
    ],
)
def test_every_listed_device_has_the_dense_peak_of_its_data_sheet(name, bf16, fp32):
    assert data_sheet_peak(name, torch.bfloat16) == bf16 * 1e12
    assert data_sheet_peak(name, torch.float16) == bf16 * 1e12
    assert data_sheet_peak(name, torch.float32) == fp32 * 1e12


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA RTX A4000", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.float64, None),
    ],
)
def test_known_devices_have_their_data_sheet_peak(name, dtype, teraflops):
    expected = None if teraflops is None else teraflops * 1e12
    assert data_sheet_peak(name, dtype) == expected


def test_a_peak_is_measured_for_unlisted_gpus_but_not_for_a_cpu():
    peak = measured_peak(torch.device("cpu"), torch.float32, size=64)
    assert peak is not None and peak.flops_per_second > 1e6
    assert peak.source == "measured 64x64 fp32 matrix product"
    assert device_peak(torch.device("cpu"), torch.float32) is None


def test_the_assumed_peak_of_a_cpu_grows_with_its_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert assumed_cpu_peak(torch.float32).flops_per_second == 4 * 100e9
    assert assumed_cpu_peak(torch.bfloat16).flops_per_second == 4 * 1000e9


def test_a_measured_peak_is_that_of_the_fastest_of_five_products(monkeypatch):
    times, products, multiply = (
        iter([0.0, 4.0, 10.0, 12.0, 20.0, 20.5, 30.0, 31.0, 40.0, 43.0]),
        [],
        torch.mm,
    )
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append((*a.shape,)) or multiply(a, b))
    monkeypatch.setattr("megatron_train.metrics.peak.time.perf_counter", lambda: next(times))
    peak = measured_peak(torch.device("cpu"), torch.float64, size=8)
    assert peak == Peak(2 * 8**3 / 0.5, "measured 8x8 fp64 matrix product")
    assert next(times, None) is None and products == [(8, 8)] * 6  # the first warms up


def step(iteration, loss):
    return {"kind": "train", "iteration": iteration, "lm loss": loss}


def start(iteration):
    return {"kind": "event", "event": "start", "iteration": iteration}


def test_repeated_steps_replace_lost_ones(tmp_path):
    path = tmp_path / "runs" / "run" / "metrics.jsonl"  # in new folders
    with RecordWriter(path) as writer:
        for record in (start(0), step(1, 5.0), step(2, 4.0), step(3, 3.0), start(2), step(3, 2.5)):
            writer.write(record)
        writer.write({"kind": "validation", "iteration": 3, "lm loss": 0.1 + 0.2})
    with pytest.raises(ValueError, match="closed"):
        writer.write(step(4, 1.0))
    records = read_records(path)
    assert [r["lm loss"] for r in records.train] == [5.0, 4.0, 2.5]
    assert records.validation[0]["lm loss"] == 0.1 + 0.2
    assert len(records.events) == 2


def test_an_unfinished_line_is_removed_and_an_invalid_one_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step(1, 5.0)) + '\n{"train": {"iter')
    with RecordWriter(path) as writer:
        writer.write(step(2, 4.0))
    assert len(read_records(path).train) == 2
    for whole in (True, False):  # a line alone, complete or not
        path.write_text(json.dumps(step(7, 5.0)) + "\n" * whole)
        RecordWriter(path).close()
        assert len(read_records(path).train) == whole
        assert path.stat().st_size == 0 or whole
    for before in ("", json.dumps(step(1, 5.0)) + "\n"):
        path.write_text(f"{before}hello\n")
        number = 1 + bool(before)
        words = re.escape(f"{path}, line {number}: not a metrics record")
        with pytest.raises(TrainError, match=words):
            read_records(path)


def test_the_plot_is_a_png(tmp_path):
    train = [{"iteration": i, "lm loss": 5.0 / i} for i in range(1, 200)]
    train[5]["lm loss"] = None
    validation = [{"iteration": 100, "lm loss": 1.0}]
    plot_losses(Records(train, validation, []), "lm loss", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_the_running_mean_covers_both_sides():
    assert running_mean([1.0, 2.0, 3.0, 8.0], 1) == [1.5, 2.0, 13 / 3, 5.5]
    assert running_mean([1.0, 2.0], 0) == [1.0, 2.0]


def test_a_header_comes_before_the_first_line_and_never_alone():
    out = io.StringIO()
    console = Console(out)
    console.header = lambda: ["one", "two"]
    assert out.getvalue() == ""
    console.print_line("three")
    console.print_line("four")
    assert out.getvalue() == "one\ntwo\nthree\nfour\n"


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as from write(2), without a file name


class SmallDisk:
    """Writes three bytes per call, as write(2) may, and holds ``room`` bytes."""

    def __init__(self, room):
        self.room, self.content = room, b""

    def write(self, data):
        taken = bytes(data[: min(3, self.room - len(self.content))])
        self.content += taken
        return len(taken) if taken else disk_full()

    def close(self):
        pass


def test_appended_data_is_complete_or_an_error_names_the_file(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with RecordWriter(path) as writer:
        writer._file._file.close()
        writer._file._file = disk = SmallDisk(25)
        writer.write({"kind": "train"})
        assert disk.content == b'{"kind": "train"}\n'
        with pytest.raises(OSError, match="No space left on device") as caught:
            writer.write({"kind": "train"})
    assert caught.value.filename == str(path)


def test_a_closed_file_refuses_writes(tmp_path):
    appended = AppendOnlyFile(tmp_path / "metrics.jsonl")
    appended.write(b"whole\n")
    appended.close()
    with pytest.raises(ValueError, match="closed"):
        appended.write(b"more\n")
    assert appended.path.read_bytes() == b"whole\n"


def test_an_event_file_names_itself_if_the_disk_is_full_and_uses_no_thread(tmp_path):
    before = threading.active_count()
    events = EventFile(tmp_path / "board", purge_step=1)
    events._file._file.close()
    events._file._file = SmallDisk(80)
    events.add_scalar("loss", 1.0, 1)
    with pytest.raises(OSError, match="No space left on device") as caught:
        events.add_scalar("loss", 1.0, 2)
    events.close()
    assert threading.active_count() == before
    (path,) = (tmp_path / "board").iterdir()
    assert caught.value.filename == str(path)


def test_tensorboard_reads_every_scalar_and_drops_repeated_steps(tmp_path):
    first = EventFile(tmp_path, purge_step=1)
    for step, value in ((1, 0.5), (2, 0.25), (3, math.nan)):
        first.add_scalar("lm loss", value, step)  # then the run is killed
    second = EventFile(tmp_path, purge_step=2)
    second.add_scalar("lm loss", -2.0, 2)
    reader = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in reader.Scalars("lm loss")] == [(1, 0.5), (2, -2.0)]
    assert reader.file_version == 2.0
    first.close()
    second.close()


def test_event_files_are_named_by_the_second_of_their_start(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_012_345_678)
    EventFile(tmp_path, purge_step=1).close()
    (path,) = tmp_path.iterdir()
    host = f"{socket.gethostname()}.{os.getpid()}"
    assert path.name == f"events.out.tfevents.1700000000.{host}.012345678"


def test_a_closed_event_file_refuses_scalars(tmp_path):
    events = EventFile(tmp_path, purge_step=1)
    events.close()
    with pytest.raises(ValueError, match="closed"):
        events.add_scalar("loss", 1.0, 1)


def test_a_file_that_cannot_be_replaced_stays_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    with write_atomically(path) as temporary:
        temporary.write_text("old")
    monkeypatch.setattr(Path, "write_text", disk_full)
    with (
        pytest.raises(OSError, match="No space left on device") as caught,
        write_atomically(path) as temporary,
    ):
        temporary.touch()
        temporary.write_text("new")
    assert caught.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"
