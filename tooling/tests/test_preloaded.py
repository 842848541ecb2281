"""A forked program behaves like one that was started."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import Forked, Preloaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux's")


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    server = Preloaded(["decimal"])
    yield server
    server.close()


def both(preloaded: Preloaded, code: str, *words: str, folder: Path, **options: object) -> list:
    """Status and output of a program that is forked, and of one that is started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SAID": "yes"}
    command = [sys.executable, "-c", code, *words]
    options = {"capture_output": True, "text": True, "cwd": folder, "env": environment} | options
    done = [run(command, **options) for run in (preloaded.run, subprocess.run)]
    return [(one.returncode, one.stdout, one.stderr) for one in done]


@pytest.mark.parametrize(
    "code",
    [
        "print('out')",
        "import sys; print(sys.stdin.read(), sys.argv, file=sys.stderr); sys.exit(3)",
        "import os; print(os.environ['SAID'], len(os.environ), os.getcwd(), os.listdir('/proc/self/fd'))",  # noqa: E501
        "import sys; sys.exit('a message')",
        "import sys; sys.exit()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import os; print('lost', end=''); os._exit(4)",
        "import threading, time; t = threading.Timer(0.1, print, ['late']); t.start()",
        "import sys; print(__name__, sys.modules['__main__'].__dict__ is globals(), sys.path[0])",
        "import sys; print([s.line_buffering for s in (sys.stdout, sys.stderr)], sys.stdout.encoding)",  # noqa: E501
        "import subprocess, sys; print(subprocess.run(['echo', 'x'], capture_output=True).stdout)",
    ],
)
def test_a_forked_program_ends_as_a_started_one(
    preloaded: Preloaded, code: str, tmp_path: Path
) -> None:
    forked, started = both(preloaded, code, "a", "b", folder=tmp_path, input="typed")
    assert forked == started


def test_a_function_is_called_before_a_forked_program(preloaded: Preloaded) -> None:
    code = "import gc; print(gc.isenabled())"
    options = {"capture_output": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    for before, expected in ((None, b"True"), ("gc:disable", b"False")):
        done = preloaded.run([sys.executable, "-c", code], before=before, **options)
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("code", ["1 / 0", "raise KeyboardInterrupt"])
def test_an_exception_is_printed_and_the_status_is_the_same(
    preloaded: Preloaded, code: str, tmp_path: Path
) -> None:
    forked, started = both(preloaded, code, folder=tmp_path)
    assert forked[:2] == started[:2]
    assert (
        forked[2].startswith("Traceback")
        and forked[2].splitlines()[-1] == (started[2].splitlines()[-1])
    )


def test_it_is_forked_from_what_was_imported_once(preloaded: Preloaded, tmp_path: Path) -> None:
    code = "import sys; print('decimal' in sys.modules)"
    forked, started = both(preloaded, code, folder=tmp_path)
    assert (forked[1], started[1]) == ("True\n", "False\n")


def test_a_module_a_script_and_a_console_script_run(preloaded: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("import sys; print(sys.argv[1:], __name__)")
    binaries = Path(sys.executable).parent
    for words in (
        [sys.executable, "-m", "there", "x"],
        [sys.executable, "there.py", "x"],
        [sys.executable, "-P", "-m", "json.tool", "--help"],
        [binaries / "pytest", "--version"],
    ):
        options = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
        with preloaded.start(words, **options, stdout=subprocess.DEVNULL) as process:
            assert isinstance(process, Forked)
        forked = preloaded.run(words, capture_output=True, text=True, **options)
        started = subprocess.run(words, capture_output=True, text=True, check=False, **options)
        assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """This process obeys SIGINT, also where a shell has started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_it_can_be_signalled_with_its_session(preloaded: Preloaded) -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    process = preloaded.start(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert isinstance(process, Forked) and process.stdout
    assert process.stdout.readline() == "up\n" and process.poll() is None
    assert os.getsid(process.pid) == process.pid
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and errors.endswith("KeyboardInterrupt\n")


def test_one_that_hangs_is_killed(preloaded: Preloaded) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run(words, timeout=0.1, env=environment)


@pytest.mark.parametrize(("option", "is_fork"), [("", True), ("'-W', 'ignore', ", False)])
def test_a_module_that_it_starts_without_options_is_forked_from_it(
    preloaded: Preloaded, tmp_path: Path, option: str, is_fork: bool
) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, sys\n"
        "os.write(int(sys.argv[1]), f'{\"decimal\" in sys.modules} {os.getpgrp() == os.getpid()} '"
        "f'{os.environ[\"RANK\"]}'.encode())\n"
        "sys.exit(7)"
    )
    code = (
        "import os, subprocess, sys\n"
        "reader, writer = os.pipe()\n"
        f"words = [sys.executable, {option}'-m', 'rank', str(writer)]\n"
        "environment = {**os.environ, 'RANK': '1'}\n"
        "p = subprocess.Popen(words, pass_fds=[writer], env=environment, process_group=0)\n"
        "print(p.wait(), os.read(reader, 100).decode())\n"
    )
    forked, started = both(preloaded, code, folder=tmp_path)
    assert forked == (0, f"7 {is_fork} True 1\n", "")
    assert started == (0, "7 False True 1\n", "")


@pytest.mark.parametrize("forks", [True, False])
def test_a_program_may_start_modules_as_processes(preloaded: Preloaded, forks: bool) -> None:
    code = "import subprocess; print(subprocess.Popen.__module__)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", code]
    with preloaded.start(words, forks=forks, env=environment, stdout=subprocess.PIPE) as process:
        assert (process.communicate()[0] == b"subprocess\n") != forks


def test_what_is_no_python_program_or_needs_threads_is_started(preloaded: Preloaded) -> None:
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    two = {**os.environ, "OMP_NUM_THREADS": "2"}
    for words, environment in ((["true"], one), ([sys.executable, "-c", "pass"], two)):
        with preloaded.start(words, env=environment) as process:
            assert not isinstance(process, Forked)
        assert process.returncode == 0


def test_orphans_of_others_stay_orphans(preloaded: Preloaded) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    threads = threading.active_count()  # pytest-xdist has one of its own
    preloaded.run([sys.executable, "-c", "pass"], env=environment)
    code = "import os; print(os.getppid())"
    words = f"({sys.executable} -c 'import time; time.sleep(0.2); {code}') & exit 0"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=True)
    assert int(done.stdout) != os.getpid()
    assert threading.active_count() == threads
