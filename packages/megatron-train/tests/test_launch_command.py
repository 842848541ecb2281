"""`--nproc-per-node`: errors that the parent reports, and the reports for exceptions."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
from megatron_train.cli import main
from megatron_train.cli.failure import failure_report
from megatron_train.cli.pretrain import ranks_to_start
from megatron_train.errors import TrainError, UsageError
from megatron_train.launch.error_file import write_error_file
from waiting import HANG

SIZES = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 9"
RUN = f"pretrain gpt {SIZES} --micro-batch-size 2 --train-iters 3 --lr 1e-3 --eval-iters 0"


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_an_invalid_number_of_ranks_is_refused(value, capsys):
    assert main(f"{RUN} --nproc-per-node={value}".split()) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and f"--nproc-per-node needs a positive integer, got {value!r}" in error
    )


def test_ranks_are_not_started_by_ranks(monkeypatch):
    assert ranks_to_start(None) == 1 and ranks_to_start("4") == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks_to_start(None) == 1
    with pytest.raises(
        UsageError, match="--nproc-per-node 4: this process is already one of 2 ranks"
    ):
        ranks_to_start("4")


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (f"{RUN} --hidden-sise 3", 2, "did you mean --hidden-size?"),
        (f"{RUN} --num-attention-heads 3 --data-path x", 1, "3"),
        (f"{RUN} --config nowhere.yaml", 1, "nowhere.yaml: No such file"),
    ],
)
def test_a_wrong_flag_is_one_line_of_the_parent_which_never_imports_torch(words, status, part):
    script = (
        "import sys; from megatron_train.cli import main\n"
        f"status = main({words.split()!r} + ['--nproc-per-node', '2'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("megatron-train: error: ") and done.stderr.count("\n") == 1
    assert part in done.stderr and not done.stdout


def test_mistakes_interrupts_and_bugs_have_different_kinds():
    assert failure_report(UsageError("no\n such flag")).message == "no such flag"
    assert failure_report(UsageError("")).status == 2
    assert failure_report(TrainError("bad")).kind == "own"
    assert (
        failure_report(FileNotFoundError(2, "No such file", "x.bin")).message
        == "x.bin: No such file"
    )
    assert failure_report(KeyboardInterrupt()).status == 130
    bug = failure_report(KeyError("x"))
    assert (bug.kind, bug.message) == ("bug", "KeyError: 'x'") and "KeyError" in bug.traceback


def test_running_out_of_memory_is_not_a_bug():
    import torch

    host = "[enforce fail at alloc_cpu.cpp:127] err == 0. CPUAllocator: can't allocate memory"
    for error, asked in (
        (RuntimeError(f"{host}: you tried to allocate 2560 bytes. Error code 12"), "2560 bytes"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU"), "2.50 GiB"),
    ):
        report = failure_report(error)
        assert (report.kind, report.status, report.traceback) == ("own", 1, "")
        assert report.message.startswith(
            f"out of memory when allocating {asked}: lower --micro-batch"
        )
    assert failure_report(MemoryError()).message.startswith(
        "out of memory: lower --micro-batch-size"
    )


def test_failures_between_ranks_are_not_bugs(monkeypatch):
    import torch.distributed as dist
    from megatron_parallel import CollectiveError

    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "5")
    start = "start-up of axis 'world' at here:5: "
    words = "rank 1 did not join all_reduce on axis 'dp' (ranks 0-1)"
    lost = failure_report(CollectiveError(words))
    assert (lost.kind, lost.status, lost.message) == ("peer", 1, start + words)
    early = failure_report(
        dist.DistStoreError("wait timeout after 3000ms, keys: /x\nException raised")
    )
    assert early.message == f"{start}communication failed: wait timeout after 3000ms, keys: /x"
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
    assert failure_report(RuntimeError(gloo)).message.endswith("failed: Connection closed by peer")
    assert failure_report(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).kind == "bug"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert failure_report(CollectiveError(words)).message == words


def test_a_port_of_another_process_has_its_own_kind(monkeypatch):
    from megatron_parallel import Mesh, ParallelLayout

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        settings = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RuntimeError) as failed:
            Mesh.bind(ParallelLayout(dp=2))
    report = failure_report(failed.value)
    assert report.kind == "port" and f"127.0.0.1:{port}" in report.message


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        ("TrainError('disk full')", 1, "megatron-train: error: rank 3: disk full\n"),
        ("KeyboardInterrupt", 130, "megatron-train: interrupted\n"),
        ("KeyError('x')", 1, "KeyError: 'x'\n"),
    ],
)
def test_a_failed_rank_of_torchrun_exits_immediately_with_one_line(raised, status, message):
    script = (
        "import atexit, os, time\n"
        "from megatron_train.cli import main, pretrain\n"
        "from megatron_train.errors import TrainError\n"
        "atexit.register(time.sleep, 60)\n"
        "os.environ.update(WORLD_SIZE='4', RANK='3')\n"
        f"def run(arguments): raise {raised}\n"
        "pretrain.run = run\n"
        f"main({RUN.split()!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status
    assert done.stderr.endswith(message) and (done.stderr == message or "Traceback" in done.stderr)


@pytest.mark.parametrize("size", ["1", "4"])
def test_a_rank_of_several_ends_without_exit_handlers_after_success_too(size, tmp_path):
    log = tmp_path / "log"
    script = (
        "import atexit, logging, logging.handlers, os, runpy, sys\n"
        "from megatron_train.cli import pretrain\n"
        f"os.environ.update(WORLD_SIZE={size!r}, RANK='0')\n"
        f"sys.argv = ['megatron-train', *{RUN.split()!r}]\n"
        f"target = logging.FileHandler({str(log)!r})\n"
        "logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, 99, target))\n"
        "atexit.register(print, 'exit handlers')\n"
        "def run(arguments):\n"
        "    logging.getLogger().error('log')\n"
        "    print('progress')\n"
        "    return 130\n"
        "pretrain.run = run\n"
        "runpy.run_module('megatron_train', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout == "progress\n" + ("exit handlers\n" if size == "1" else "")
    assert log.read_text() == "log\n"


@pytest.mark.parametrize(("launcher", "unbuffered"), [("megatron-train", "1"), ("torchrun", "")])
def test_a_rank_writes_each_line_at_once(launcher, unbuffered):
    link, theirs = socket.socketpair()
    output, written = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    script = (
        "import os, sys\n"
        "from megatron_train.cli import main, pretrain, rank\n"
        "os.environ.update(WORLD_SIZE='2', RANK='0')\n"
        f"sys.argv = ['rank', '{theirs.fileno()}', '-', *{RUN.split()!r}]\n"
        "def run(arguments):\n"
        "    print('step', 1, 'loss', 2.5)\n"
        "    print('step', 2, 'loss', 1.5)\n"
        "    return 0\n"
        "pretrain.run = run\n"
        f"main(sys.argv[3:]) if {launcher == 'torchrun'} else rank.main()\n"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with link, theirs, output:
        with written:
            subprocess.run(
                [sys.executable, "-c", script],
                stdout=written,
                env=environment,
                pass_fds=[theirs.fileno()],
                check=True,
                timeout=HANG,
            )
        assert list(iter(lambda: output.recv(100), b"")) == [
            b"step 1 loss 2.5\n",
            b"step 2 loss 1.5\n",
        ]


def test_a_rank_writes_its_line_to_the_file_of_torchrun(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main(f"{RUN} --num-attention-heads 3".split()) == 1
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"].startswith("megatron-train: error: ")
    assert "--num-attention-heads" in failure.message["message"]
    assert abs(failure.timestamp - time.time()) < 600


def test_the_file_of_torchrun_has_the_traceback_of_a_bug_and_no_interrupt(tmp_path):
    file = tmp_path / "error.json"
    there = {"TORCHELASTIC_ERROR_FILE": str(file)}
    write_error_file(failure_report(KeyboardInterrupt()), there)
    write_error_file(failure_report(TrainError("bad")), {})
    assert not file.exists()
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError as error:
        write_error_file(failure_report(error), there)
    shown = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    first, *rest = shown.splitlines()
    assert first == "megatron-train: error: ZeroDivisionError: a bug"
    assert rest[0].startswith("Traceback") and rest[-1] == "ZeroDivisionError: a bug"
    write_error_file(failure_report(TrainError("bad")), {"TORCHELASTIC_ERROR_FILE": str(tmp_path)})


def test_the_summary_of_torchrun_has_the_line_of_the_failed_rank(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    words = ["--standalone", "--nproc-per-node", "2", "-m", "megatron_train", *RUN.split()]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--num-attention-heads", "3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 1
    summary = done.stderr.partition("Root Cause (first observed failure)")[2]
    line = r"traceback : megatron-train: error: .*--num-attention-heads 3"
    assert re.search(line, summary), done.stderr
