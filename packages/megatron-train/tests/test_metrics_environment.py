"""What a run is measured against and runs in: peaks, versions, commit, and its console."""

import io
import logging
import os
import platform
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
from megatron_train.metrics import environment as module
from megatron_train.metrics import peak
from megatron_train.metrics.console import Console
from megatron_train.metrics.environment import environment
from megatron_train.metrics.peak import Peak, assumed_cpu_peak, device_peak, measured_peak

GPU = torch.device("cuda")
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "found"),
    [
        (H100, torch.bfloat16, False, Peak(989e12, f"data sheet of {H100}, dense bf16")),
        (H100, torch.bfloat16, True, Peak(989e12, f"data sheet of {H100}, dense bf16")),
        (H100, torch.float16, False, Peak(989e12, f"data sheet of {H100}, dense fp16")),
        (H100, torch.float32, False, Peak(67e12, f"data sheet of {H100}, dense fp32")),
        (H100, torch.float32, True, "measured"),  # the data sheet has the figure without TF32
        (H100, torch.float64, False, "measured"),
        ("NVIDIA X", torch.bfloat16, False, "measured"),
    ],
)
def test_a_gpu_has_the_peak_of_its_data_sheet_or_is_measured(monkeypatch, name, dtype, tf32, found):
    matmul = type("Matmul", (), {"allow_tf32": tf32})
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(peak, "measured_peak", lambda *words: words)
    assert device_peak(GPU, dtype) == ((GPU, dtype) if found == "measured" else found)


def test_a_product_is_measured_with_8192_rows_and_not_if_they_do_not_fit(monkeypatch):
    sizes = []

    def ones(*shape, **options):
        sizes.append(shape)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    assert measured_peak(torch.device("cpu"), torch.bfloat16) is None
    assert measured_peak(torch.device("cpu"), torch.bfloat16, size=16) is None
    assert sizes == [(8192, 8192), (16, 16)]


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_a_product_of_a_gpu_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch, device):
    events = []

    def clock():
        events.append("clock")
        return float(len(events))

    matrix = SimpleNamespace(device=device)
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: matrix)
    monkeypatch.setattr(torch, "mm", lambda *words: events.append("product"))
    monkeypatch.setattr(torch.cuda, "synchronize", events.append)
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=clock))
    assert measured_peak(device, torch.bfloat16) is not None
    wait = [device] if device == GPU else []
    assert events == ["product", *[*wait, "clock", "product", *wait, "clock"] * 5]


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, "100"), (torch.float16, "1000")])
def test_an_assumed_peak_says_so(dtype, each):
    assert assumed_cpu_peak(dtype).source == f"{each} GFLOP/s assumed for each CPU thread"


def test_the_environment_of_a_cpu_has_its_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(module, "_commit", lambda: None)
    facts = environment(torch.device("cpu"))
    assert facts["device"] == f"{platform.machine()} CPU, 3 of 8 threads"
    assert "cuda" not in facts and module.CONNECTIONS not in facts


@pytest.mark.parametrize("connections", [None, "1"])
def test_the_environment_of_a_gpu_has_its_name_and_connections(monkeypatch, connections):
    monkeypatch.delenv(module.CONNECTIONS, raising=False)
    if connections is not None:
        monkeypatch.setenv(module.CONNECTIONS, connections)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(module, "_commit", lambda: None)
    facts = environment(GPU)
    assert (facts["device"], facts["cuda"]) == (H100, str(torch.version.cuda))
    assert facts[module.CONNECTIONS] == (connections or "unset")


@pytest.mark.parametrize(
    ("tracked", "described", "commit"),
    [
        (0, "0123456789ab+\n", "0123456789ab+"),
        (0, "\n", None),
        (1, "0123456789ab\n", None),  # the work tree of something else
        (0, subprocess.CalledProcessError(128, "git"), None),
        (subprocess.TimeoutExpired("git", 5), "0123456789ab\n", None),
        (FileNotFoundError(2, "No such file", "git"), "0123456789ab\n", None),
    ],
)
def test_the_commit_is_that_of_a_tracked_source(monkeypatch, tracked, described, commit):
    def run(words, **options):
        assert options["capture_output"] and options["timeout"] > 0
        found = tracked if "ls-files" in words else described
        if isinstance(found, Exception):
            raise found
        code = found if "ls-files" in words else 0
        decoded = options.get("text") or isinstance(described, Exception)
        return subprocess.CompletedProcess(
            words, code, stdout=described if decoded else described.encode()
        )

    monkeypatch.setattr(subprocess, "run", run)
    assert environment(torch.device("cpu")).get("commit") == commit


def test_warnings_of_a_logger_are_forwarded_within_the_context(capsys):
    console, logger = Console(), logging.getLogger("megatron_forwarded")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.NullHandler())
    with console.forward_warnings("megatron_forwarded"):
        logger.warning("%d files are %s", 2, "torn")
        logger.info("not shown")
    logger.error("later")
    assert capsys.readouterr().err == "megatron-train: warning: 2 files are torn\n"


def test_lines_are_passed_on_at_once(monkeypatch):
    lines, warnings = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    monkeypatch.setattr("sys.stderr", warnings)
    console = Console(lines)
    console.print_line("one")
    console.warn("two")
    assert lines.buffer.getvalue() == b"one\n"
    assert warnings.buffer.getvalue() == b"megatron-train: warning: two\n"


@pytest.mark.parametrize("silent", [False, True])
def test_a_bar_ends_with_its_line_and_silent_consoles_have_none(monkeypatch, silent):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    console = Console(silent=silent)
    console.start_bar(1000, 0)
    console.advance_bar(500, "step 1")
    console.stop_bar()
    shown = re.findall(r"training: +(\d+)%", terminal.getvalue())
    assert shown == [] if silent else shown[0] == "0"
    assert terminal.getvalue().endswith("" if silent else "\n")
    assert bool(terminal.getvalue()) == (not silent)
