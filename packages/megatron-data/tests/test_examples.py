"""The examples of docs/any-training-loop.md, stopped and resumed."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, commands, save_titled
from megatron_data.cli.main import main

PAGE = ROOT / "docs" / "any-training-loop.md"
STEPS = 25


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files of the page and the corpus made by its commands."""
    folder = tmp_path_factory.mktemp("reader")
    save_titled(PAGE, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands(PAGE):
            name, *words = shlex.split(command.text)
            if name == "megatron-data":
                assert main(words) == 0
            elif words == ["make_corpus.py"]:
                runpy.run_path(*words)
    return folder


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Returns environment variables with which a process cannot import torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}


def test_the_page_shows_three_loops_that_stop_and_resume() -> None:
    typed = [command.text for command in commands(PAGE) if "_loop.py" in command.text]
    loops = ("numpy_loop.py", "torch_loop.py", "hugging_face_loop.py")
    assert typed == [f"python {loop} {step}" for loop in loops for step in (10, STEPS)]


@pytest.mark.parametrize("loop", ["numpy", "hugging_face"])
def test_a_loop_without_torch_resumes_exactly(
    loop: str, reader: Path, without_torch: dict[str, str]
) -> None:
    def run(step: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, f"{loop}_loop.py", str(step)],
            cwd=reader,
            env=without_torch,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    check = subprocess.run([sys.executable, "-c", "import torch"], env=without_torch, check=False)
    assert check.returncode != 0, "torch can be imported, so this test shows nothing"
    stopped, gone_on = run(10), run(STEPS)
    assert (len(stopped), len(gone_on)) == (10, STEPS - 10)
    state = reader / f"{loop}_state.json"
    assert state.read_text() == f'{{"consumed_samples": {STEPS * 8}}}'
    state.unlink()
    assert run(STEPS) == stopped + gone_on
    losses = [float(line.rpartition(" ")[2]) for line in stopped + gone_on]
    assert losses[-1] < 0.5 * losses[0]


def test_the_torch_loop_resumes_exactly(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="torch is an extra of this package")
    monkeypatch.chdir(reader)
    # In this process, where torch is loaded already. test_torch.py tests worker processes.
    script = Path("torch_loop.py").read_text()
    Path("torch_here.py").write_text(script.replace("workers=2", "workers=0"))

    def run(step: int) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["torch_here.py", str(step)])
        runpy.run_path("torch_here.py", run_name="__main__")
        return re.findall("loss (.*)", capsys.readouterr().out)

    stopped, gone_on = run(10), run(STEPS)
    assert (len(stopped), len(gone_on)) == (10, STEPS - 10)
    Path("torch_state.pt").unlink()
    assert run(STEPS) == stopped + gone_on
    assert float(gone_on[-1]) < 0.5 * float(stopped[0])
