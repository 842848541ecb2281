"""tooling/bare_install.py and tooling/gpu.sh, where nothing of ours is installed."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

QUESTIONS = """
import json, sys
from importlib import metadata
import megatron_models
print(json.dumps({
    "origin": megatron_models.__file__,
    "version": metadata.version("megatron-models"),
    "requires": metadata.requires("megatron-models"),
    "families": sorted(metadata.entry_points(group="megatron.families").names),
    "plugin": [point.value for point in metadata.entry_points(group="pytest11")],
}))
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The python of an environment without packages that sees one third party, lazy-loader."""
    import lazy_loader

    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    library = next((tmp_path / "bare" / "lib").glob("python*/site-packages"))
    (library / "lazy_loader").symlink_to(Path(lazy_loader.__file__).parent)
    return python


def evaluate(python: Path, site: Path, command: str) -> subprocess.CompletedProcess[str]:
    line = f'eval "$({python} tooling/bare_install.py {site})" && {command}'
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def pretend_pytest(python: Path) -> None:
    library = next(python.parents[1].glob("lib/python*/site-packages"))
    info = library / "pytest-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: pytest\nVersion: 9.0\n")


def test_versions_and_entry_points_resolve_from_source_folders(bare: Path, tmp_path: Path) -> None:
    pretend_pytest(bare)
    done = evaluate(bare, tmp_path / "site", f"{bare} -c '{QUESTIONS}'")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    source = ROOT / "packages/megatron-models/src/megatron_models"
    assert answers["origin"] == str(source / "__init__.py")
    assert f'"{answers["version"]}"' in (source / "_version.py").read_text()
    assert any(line.startswith("megatron-parallel") for line in answers["requires"])
    assert {"gpt2", "llama"} <= set(answers["families"])
    assert answers["plugin"] == ["megatron_parallel.testing.plugin"]


def test_commands_are_on_the_path(bare: Path, tmp_path: Path) -> None:
    pretend_pytest(bare)
    done = evaluate(bare, tmp_path / "site", "command -v megatron-data && echo $TEST_FOLDERS")
    assert done.stdout.splitlines()[0] == str(tmp_path / "site" / "bin" / "megatron-data")


def test_what_is_missing_is_named(bare: Path, tmp_path: Path) -> None:
    pretend_pytest(bare)
    done = evaluate(bare, tmp_path / "site", "echo $TEST_FOLDERS")
    assert "megatron-parallel is not tested: jaxtyping, lazy-loader, numpy, torch" in done.stderr
    assert "beartype is not installed: shape annotations are not checked" in done.stderr
    assert "hypothesis is not installed: test files that import it are skipped" in done.stderr
    assert done.stdout.strip() in ("", "integration_tests")


def test_without_pytest_there_is_one_line_and_a_failure(bare: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bare, "tooling/bare_install.py", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"bare_install: error: pytest is not installed for {bare}; nothing can be tested"
    ]


ONE_FILE = "packages/megatron-parallel/tests/test_pool_gpu.py"


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([ONE_FILE], id="one file"),
        pytest.param([], id="everything", marks=pytest.mark.slow),
    ],
)
def test_the_gpu_script_counts_what_it_skips(files: list[str]) -> None:
    """Named files are collected alone, in seconds; everything takes half a minute."""
    done = subprocess.run(
        ["bash", "tooling/gpu.sh", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "devices: none" in done.stdout
    assert "SKIPPED" in done.stdout and "needs a CUDA device" in done.stdout
    counted = re.match(r"(\d+) skipped(, \d+ deselected)? in ", done.stdout.splitlines()[-1])
    assert counted, done.stdout[-1000:]
    assert int(counted[1]) == 2 if files else int(counted[1]) > 50


def test_a_file_that_lacks_a_third_party_is_skipped_by_name(tmp_path: Path) -> None:
    (tmp_path / "test_lacks.py").write_text("import no_such_third_party\n")
    (tmp_path / "test_ours.py").write_text("import megatron_no_such\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "skip_missing", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tooling")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no_such_third_party is not installed" in done.stdout
    assert "1 skipped, 1 error" in done.stdout.splitlines()[-1]
