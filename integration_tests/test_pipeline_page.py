"""docs/pipeline-parallelism.md: its two programs run, agree, and print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks, save_titled
from megatron_train.launch.environment import free_port
from preloaded import Preloaded

PAGE = ROOT / "docs" / "pipeline-parallelism.md"
END = "# End of the 40 lines."


def run(program: str, folder: Path, preloaded: Preloaded) -> list[tuple[int, str, str]]:
    """Returns status, output and errors of a program of the page on each of four ranks.

    The ranks are forks with the environment that torchrun gives to its processes.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        preloaded.start(
            [sys.executable, program],
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        results = [(*rank.communicate(timeout=240), rank.returncode) for rank in ranks]
        return [(status, output, errors) for output, errors, status in results]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def shown() -> list[str]:
    """Returns the lines that the page says a program prints."""
    (block,) = [block for block in blocks(PAGE.read_text()) if block.language == "text"]
    return block.text.splitlines()


@pytest.mark.parametrize("program", ["pipeline.py", "engine.py"])
def test_a_program_prints_what_the_page_shows(
    program: str, tmp_path: Path, preloaded: Preloaded
) -> None:
    save_titled(PAGE, tmp_path)
    ranks = run(program, tmp_path, preloaded)
    assert [status for status, _, _ in ranks] == [0] * 4, ranks
    assert sorted(line for _, output, _ in ranks for line in output.splitlines()) == shown()


def test_the_program_notices_that_it_is_wrong(tmp_path: Path, preloaded: Preloaded) -> None:
    save_titled(PAGE, tmp_path)
    program = tmp_path / "pipeline.py"
    text = program.read_text()
    assert "saved.pop(0)" in text
    program.write_text(text.replace("saved.pop(0)", "saved.pop()"))
    ranks = run("pipeline.py", tmp_path, preloaded)
    assert any(status and "AssertionError" in errors for status, _, errors in ranks), ranks


def test_the_pipeline_has_40_lines(tmp_path: Path) -> None:
    save_titled(PAGE, tmp_path)
    before, end, _ = (tmp_path / "pipeline.py").read_text().partition(END)
    assert end
    assert len([line for line in before.splitlines() if line.strip()]) <= 40


def test_the_files_that_it_leads_to_exist() -> None:
    folder = ROOT / "packages/megatron-parallel/src/megatron_parallel/pipeline"
    rows = [line.split("|")[2] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    files = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row)]
    assert len(files) >= 8
    for name in files:
        assert (folder / name).exists(), name
