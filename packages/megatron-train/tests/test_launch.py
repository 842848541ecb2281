"""Launches of ranks that are small scripts: how they end, and the outcome of the launch."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from megatron_parallel import ParallelLayout
from megatron_train.launch.environment import CONNECTIONS, cuda_defaults, rank_environment
from megatron_train.launch.launch import launch
from waiting import HANG, wait_until

GRACE = 2.0
"""Seconds of grace in tests that wait for its end."""
START = """
import os, signal, sys, time
from megatron_train.launch.link import ParentLink, FailureReport
link = ParentLink(int(sys.argv[1]))
link.exit_with_parent()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def fail(kind, message, status=1, traceback=""):
    link.send(FailureReport(kind, message, status, traceback))
    os._exit(status)
"""
OTHERS_MISS_RANK_1 = """
if rank != 1:
    time.sleep(0.3)
    fail("peer", "rank 1 did not join all_reduce on axis 'dp' (ranks 0-2)")
"""


@pytest.fixture
def run(capfd):
    """Returns a function that runs a script as ranks; it returns outcome, output and seconds."""

    def start(script, ranks=3, grace=10 * HANG, **options):
        began = time.monotonic()
        code = START + textwrap.dedent(script)
        outcome = launch([sys.executable, "-c", code], [], ranks, grace=grace, **options)
        return outcome, capfd.readouterr(), time.monotonic() - began

    return start


def test_ranks_get_their_number_and_rank_0_the_terminal(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    opened = _descriptors()
    outcome, printed, _ = run("""
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS".split()
        words = [*(os.environ[name] for name in names), str(int(os.environ["MASTER_PORT"]) > 0)]
        os.write(1, (" ".join(words) + "\\n").encode())  # at once: all ranks write now
        print("noise", file=sys.stderr)
        if rank == 0:
            os.write(int(sys.argv[2]), b"for people")
            assert os.isatty(int(sys.argv[2])) == os.isatty(2)
        else:
            assert sys.argv[2] == "-"
    """)
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert outcome.status == 0 and not outcome.message and not outcome.details
    lines = [f"{rank} {rank} 3 3 127.0.0.1 {threads} True" for rank in range(3)]
    lines = [lines[0], f"[rank 1] {lines[1]}", f"[rank 2] {lines[2]}"]
    plural = "thread" if threads == 1 else "threads"
    notice = f"3 ranks of {threads} {plural} each (set by OMP_NUM_THREADS)"
    assert sorted(printed.out.splitlines()) == sorted([notice, *lines])
    assert printed.err == "for people"
    assert _descriptors() <= opened


def test_a_given_number_of_threads_is_kept_without_output(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    outcome, printed, _ = run("print(os.environ['OMP_NUM_THREADS'])", ranks=2)
    assert outcome.status == 0
    assert sorted(printed.out.splitlines()) == ["7", "[rank 1] 7"]


def test_the_error_of_one_rank_is_the_line(run):
    outcome, printed, _ = run("""
        if rank == 1: fail("own", "good.bin is torn", 1)
        time.sleep(0.3)
        fail("peer", "rank 1 did not join all_reduce on axis 'dp' (ranks 0-2)")
    """)
    assert (outcome.status, outcome.message) == (1, "rank 1: good.bin is torn")
    assert not outcome.details and not printed.err


@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT", "SIGSEGV"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_by_a_signal_is_named_with_axis_and_operation(run, name, victim):
    outcome, printed, seconds = run(f"""
        if rank == {victim}:
            os.write(2, b"terminate called\\n  what():  the pair is closed\\n")
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.{name})
        time.sleep(0.3)
        fail("peer", "rank {victim} did not join all_reduce on axis 'dp' (ranks 0-2)")
    """)
    assert outcome.status == 128 + getattr(signal, name)
    assert outcome.message.startswith(f"rank {victim} was killed by {name} (")
    assert ("(the pair is closed)" in outcome.message) == (name != "SIGKILL")
    assert f"rank {victim} did not join all_reduce on axis 'dp'" in outcome.message
    assert printed.err == "" and seconds < HANG


def test_a_suspended_rank_is_killed_when_the_others_have_missed_it(run, tmp_path):
    outcome, _, seconds = run(f"""
        open(f"{tmp_path}/{{rank}}", "w").write(str(os.getpid()))
        if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
        {OTHERS_MISS_RANK_1.strip().replace(chr(10), chr(10) + " " * 8)}
    """)
    assert outcome.status == 1
    assert outcome.message.startswith("rank 1 is suspended (SIGSTOP); rank ")
    assert ": rank 1 did not join all_reduce on axis 'dp'" in outcome.message
    assert seconds < HANG, "the other ranks had ended"
    assert not _alive(int((tmp_path / "1").read_text()))


def test_ranks_that_do_not_notice_a_failure_are_killed_after_the_grace(run):
    outcome, _, seconds = run("""
        if rank == 1: fail("own", "disk full")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    """, grace=GRACE)  # fmt: skip
    assert outcome.message == "rank 1: disk full"
    assert GRACE <= seconds < HANG


def test_a_rank_that_reports_and_then_hangs_is_killed(run):
    outcome, _, seconds = run("""
        if rank == 1:
            link.send(FailureReport("own", "disk full"))
            time.sleep(600)
    """, grace=GRACE)  # fmt: skip
    assert (outcome.status, outcome.message) == (1, "rank 1: disk full")
    assert seconds < HANG


def test_a_rank_that_outlives_the_others_is_killed_after_the_timeout(run):
    outcome, _, seconds = run("if rank == 1: time.sleep(600)", timeout=0.0, grace=GRACE)
    assert outcome.status == 1 and "rank 1 did not end" in outcome.message
    assert GRACE <= seconds < HANG


def test_a_suspended_rank_that_others_cannot_miss_is_killed_so_that_they_notice(run, tmp_path):
    outcome, _, seconds = run(f"""
        file = "{tmp_path}/pid"
        if rank == 0:
            open(file, "w").write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        while not os.path.exists(file) or not open(file).read(): time.sleep(0.01)
        while os.path.exists("/proc/" + open(file).read()): time.sleep(0.01)
        fail("peer", "rank 0, which keeps the job's store, is gone: all_reduce on axis 'tp'")
    """, timeout=0.5, grace=2 * GRACE)  # fmt: skip
    assert outcome.message.startswith("rank 0 is suspended (SIGSTOP); rank ")
    assert ": rank 0, which keeps the job's store, is gone: all_reduce" in outcome.message
    assert 0.5 + GRACE <= seconds < HANG


def test_a_job_that_is_suspended_as_a_whole_may_continue(parent):
    process, ranks = parent("""
        READY
        time.sleep(0.5)
    """)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    time.sleep(2.5)
    assert process.poll() is None
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    out, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0 and "outcome False ''" in out


def test_the_traceback_of_a_bug_is_shown_whole_and_once(run):
    outcome, printed, _ = run("""
        import traceback
        try:
            {}["x"]
        except KeyError as error:
            fail("bug", "KeyError: 'x'", 1, traceback.format_exc())
    """)
    assert (outcome.status, outcome.details.count("Traceback")) == (1, 1)
    assert outcome.message == "KeyError: 'x' (a bug; its traceback is above)"
    assert not printed.err


def test_a_rank_that_cannot_start_is_quoted(run):
    outcome, printed, _ = run("import no_such_module\n")
    assert outcome.status == 1
    assert outcome.message.startswith("rank ")
    assert outcome.message.endswith("No module named 'no_such_module'")
    assert outcome.details.count("Traceback") == 1 and not printed.err


def test_output_is_forwarded_during_the_run_and_completely(run):
    outcome, printed, _ = run("""
        if rank == 1:
            sys.stdout.write("x" * 300_000 + "\\nlast")
            sys.stderr.write("w" + "y" * 300_000 + "z")
            sys.exit(5)
    """)
    assert outcome.status == 5
    assert outcome.details == f"[rank 1] {'y' * (2**16 - 1)}z\n"  # the newest 64 KiB
    assert f"[rank 1] {'x' * 300_000}\n[rank 1] last\n" in printed.out


def test_children_of_a_rank_end_with_it(run, tmp_path):
    outcome, _, _ = run(f"""
        import subprocess
        if rank == 1:
            child = subprocess.Popen(["sleep", "60"])
            open("{tmp_path}/child", "w").write(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:  # a daemon, which keeps the pipes open
            child = subprocess.Popen(["sleep", "{HANG:g}"], start_new_session=True)
            open("{tmp_path}/daemon", "w").write(str(child.pid))
    """)
    assert outcome.status == 137
    assert _gone(int((tmp_path / "child").read_text()))
    daemon = int((tmp_path / "daemon").read_text())
    assert _alive(daemon)
    os.kill(daemon, signal.SIGKILL)


def test_a_launch_is_repeated_if_its_port_is_taken(run, tmp_path):
    outcome, printed, _ = run(f"""
        seen = "{tmp_path}/seen"
        if rank == 0 and not os.path.exists(seen):
            open(seen, "w").write(os.environ["MASTER_PORT"])
            fail("port", "taken")
        time.sleep(0.5)
        if rank == 0: print(open(seen).read() != os.environ["MASTER_PORT"])
        if not os.path.exists(seen): time.sleep(600)
    """, ranks=2)  # fmt: skip
    assert outcome.status == 0 and printed.out.endswith("True\n")


PARENT = """
import sys
from megatron_train.launch.launch import launch
outcome = launch([sys.executable, "-c", sys.argv[1]], [], 2, grace=3, timeout=0.1)
print("outcome", outcome.interrupted, repr(outcome.message), flush=True)
sys.exit(outcome.status)
"""


@pytest.fixture
def parent(tmp_path):
    """Returns a function that starts a parent process, which has started two ranks."""
    started = []

    def start(script):
        code = START + textwrap.dedent(script).replace(
            "READY", f"open('{tmp_path}/' + str(rank), 'w').write(str(os.getpid()))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        files = [tmp_path / str(rank) for rank in (0, 1)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return process, [int(file.read_text()) for file in files]

    yield start
    for process in started:
        process.kill()
        process.communicate()


ORDERLY = """
def stop(number, frame):
    global stops
    stops += 1
    print(f"stops {stops}\\n", end="", flush=True)  # in one piece: both ranks write at once
stops = 0
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
READY
while not stops: time.sleep(0.01)
time.sleep(0.5)
os._exit(128 + int({number}) if stops == 1 else 99)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_once_and_ranks_exit_cleanly(parent, number):
    process, ranks = parent(ORDERLY.replace("{number}", str(int(number))))
    process.send_signal(number)
    out, _ = process.communicate(timeout=HANG)
    assert process.returncode == 128 + number
    assert out.count("stops 1") == 2 and "stops 2" not in out
    assert "outcome False ''" in out
    assert not any(map(_alive, ranks))


def test_a_second_signal_ends_ranks_that_do_not_stop(parent):
    process, ranks = parent("""
        signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
        READY
        while True: time.sleep(1)
    """)
    process.send_signal(signal.SIGINT)
    while "heard" not in process.stdout.readline():
        pass
    time.sleep(0.3)
    assert all(map(_alive, ranks))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=HANG)
    assert process.returncode == 130 and "outcome True ''" in out
    assert not any(map(_alive, ranks))


@pytest.mark.parametrize("suspended", [False, True])
def test_no_rank_survives_a_killed_parent(parent, suspended):
    process, ranks = parent(f"""
        READY
        if rank == 1 and {suspended}: os.kill(os.getpid(), signal.SIGSTOP)
        while True: time.sleep(1)
    """)
    time.sleep(0.3)
    process.kill()
    process.wait()
    assert all(map(_gone, ranks))


def test_variables_of_the_user_take_precedence():
    base = {"OMP_NUM_THREADS": "9", "GLOO_SOCKET_IFNAME": "eth0", "RANK": "8", "HOME": "/h"}
    made = rank_environment({**base, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 1, 4, 2345, 2)
    assert made["OMP_NUM_THREADS"] == "9" and made["GLOO_SOCKET_IFNAME"] == "eth0"
    assert made["RANK"] == made["LOCAL_RANK"] == "1" and made["HOME"] == "/h"
    assert made["WORLD_SIZE"] == made["LOCAL_WORLD_SIZE"] == "4"
    assert made["MASTER_PORT"] == "2345" and "TORCHELASTIC_USE_AGENT_STORE" not in made


@pytest.mark.parametrize("given", [None, "8"])
def test_defaults_of_variables_yield_to_those_of_the_user(run, monkeypatch, given):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if given:
        monkeypatch.setenv(CONNECTIONS, given)
    script = f"print(os.environ[{CONNECTIONS!r}]) if rank == 0 else None"
    outcome, printed, _ = run(script, 2, defaults={CONNECTIONS: "1"})
    assert outcome.status == 0 and printed.out.splitlines()[-1] == (given or "1")


@pytest.mark.parametrize(
    ("layout", "fully_sharded", "one"),
    [
        ({"tp": 2}, False, True),
        ({"cp": 2}, False, True),
        ({"tp": 2}, True, False),
        ({"dp": 4, "pp": 2}, False, False),
    ],
)
def test_kernels_of_layouts_that_overlap_start_in_the_order_of_launches(layout, fully_sharded, one):
    found = cuda_defaults(ParallelLayout(**{"dp": 2, **layout}), fully_sharded=fully_sharded)
    assert found == ({CONNECTIONS: "1"} if one else {})


def _descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def _alive(pid):
    """Returns whether a process runs; zombies, which some containers do not reap, do not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not stat.stdout.strip().startswith("Z") and stat.returncode == 0


def _gone(pid):
    wait_until(lambda: not _alive(pid))
    return True
