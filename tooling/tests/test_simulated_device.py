"""Errors of the simulated device, and its coverage of `torch.cuda`."""

import ast
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import simulated_device.library as library
from simulated_device import NotSimulatedError, load


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of torch; the cache is empty and no program is on the path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def test_a_missing_compiler_is_reported(torch_folder: Path) -> None:
    with pytest.raises(
        NotSimulatedError, match=r"no C\+\+ compiler; install one of c\+\+, g\+\+, clang"
    ):
        library._compiled(torch_folder)


def test_a_failing_compiler_is_reported_with_its_output(torch_folder: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'unknown option -std=c++20' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(NotSimulatedError) as caught:
        library._compiled(torch_folder)
    expected = f"{os.fspath(compiler)} cannot compile guard.cpp: unknown option -std=c++20"
    assert str(caught.value).startswith(expected)
    assert list((tmp_path / "cache" / "megatron-simulated-device").iterdir()) == []


def test_loading_after_torch_is_refused() -> None:
    import torch  # noqa: F401

    with pytest.raises(NotSimulatedError, match="torch was imported before"):
        load()


def test_all_uses_of_torch_cuda_in_the_packages_are_simulated() -> None:
    import torch
    from simulated_device.functions import functions

    packages = Path(__file__).parents[2] / "packages"
    nodes = (
        node
        for path in packages.glob("*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
    }
    real = {name: getattr(torch.cuda, name) for name in used}
    assert len(real) >= 8
    with functions(cast("Any", SimpleNamespace(waits_for=None))):
        assert [name for name in sorted(used) if getattr(torch.cuda, name) is real[name]] == []
        assert torch.cuda.get_device_properties("cuda").total_memory > 1 << 28
