"""Optional libraries that are missing or broken never break an import, a call or a command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BROKEN = ("triton", "flash_attn", "flash_attn_interface", "transformer_engine", "apex")
ALL = """
import json, sys
before = set(sys.modules)
import megatron_kernels
lazy = set(sys.modules) - before
import torch
before = set(sys.modules)
names = [getattr(megatron_kernels, name) for name in megatron_kernels.__all__]
loaded = set(sys.modules) - before
x = torch.ones(3, 16)
megatron_kernels.rms_norm(x, torch.ones(16))
from megatron_kernels.cli import main
status = main(["list"])
found = [name for name in {broken!r} if name in sys.modules]
torch.cuda.is_available = lambda: True
from megatron_kernels.availability import LIBRARIES, unavailable_reason
reasons = {{library.module: unavailable_reason(library.name) for library in LIBRARIES}}
print(json.dumps([sorted(lazy), sorted(loaded), status, found, reasons]))
"""


def run(path: Path | None) -> Any:
    """Returns what a new process finds that has a folder before all others of its path."""
    environment = {**os.environ}
    if path is not None:
        inherited = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), inherited)))
    done = subprocess.run(
        [sys.executable, "-c", ALL.format(broken=BROKEN)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def with_broken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what a process finds whose optional libraries all fail to be imported."""
    folder = tmp_path_factory.mktemp("broken")
    for module in BROKEN:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(
            "raise OSError('undefined symbol: built for another torch')\n"
        )
        version = "2.15" if module == "transformer_engine" else "9.0"
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir()
        name = module.replace("_", "-")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
    (folder / "apex" / "normalization").mkdir()
    (folder / "transformer_engine" / "pytorch").mkdir()
    for package in ("apex/normalization", "transformer_engine/pytorch"):
        (folder / package / "__init__.py").write_text("")
    return run(folder)


def test_broken_libraries_break_no_import_and_no_command(with_broken: Any) -> None:
    _, _, status, found, _ = with_broken
    assert status == 0 and found == []


@pytest.mark.parametrize("module", BROKEN)
def test_a_call_that_needs_a_broken_library_reports_its_error(
    with_broken: Any, module: str
) -> None:
    reason = with_broken[-1][module]
    assert reason.endswith(
        "is installed but cannot be imported: OSError: undefined symbol: built for another torch"
    )


def test_an_import_loads_nothing_and_all_names_load_no_library() -> None:
    lazy, loaded, status, found, _ = run(None)
    assert status == 0 and found == []
    assert {name.partition(".")[0] for name in lazy} & {"torch", "jaxtyping", "numpy"} == set()
    assert [name for name in lazy if name.startswith("megatron_kernels.")] == []
    others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert others == {"megatron_kernels", "jaxtyping", "numpy"}  # jaxtyping loads numpy.typing
    assert len(loaded) < 130, len(loaded)  # each takes part of a millisecond
    assert "megatron_kernels.cases" not in loaded
