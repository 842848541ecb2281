"""docs/pipeline-parallelism.md: its two programs run, agree, and print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks, save_titled

PAGE = ROOT / "docs" / "pipeline-parallelism.md"
END = "# End of the 40 lines."


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Returns what a program of the page did on four ranks."""
    torchrun = Path(sys.executable).with_name("torchrun")
    return subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "4", program],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def shown() -> list[str]:
    """Returns the lines that the page says a program prints."""
    (block,) = [block for block in blocks(PAGE.read_text()) if block.language == "text"]
    return block.text.splitlines()


@pytest.mark.parametrize("program", ["pipeline.py", "engine.py"])
def test_a_program_prints_what_the_page_shows(program: str, tmp_path: Path) -> None:
    save_titled(PAGE, tmp_path)
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == shown()


def test_the_program_notices_that_it_is_wrong(tmp_path: Path) -> None:
    save_titled(PAGE, tmp_path)
    program = tmp_path / "pipeline.py"
    text = program.read_text()
    assert "saved.pop(0)" in text
    program.write_text(text.replace("saved.pop(0)", "saved.pop()"))
    done = run("pipeline.py", tmp_path)
    assert done.returncode != 0 and "AssertionError" in done.stderr


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
