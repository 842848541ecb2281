"""What the simulated device says where it cannot be had."""

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
    """Where torch lies; the cache is empty and no program is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def test_no_compiler_is_said(torch_folder: Path) -> None:
    with pytest.raises(NotSimulatedError, match=r"no C\+\+ compiler: none of c\+\+, g\+\+, clang"):
        library._compiled(torch_folder)


def test_a_compiler_that_fails_is_named_with_what_it_says(
    torch_folder: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'unknown option -std=c++20' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(NotSimulatedError) as caught:
        library._compiled(torch_folder)
    said = f"{os.fspath(compiler)} cannot compile guard.cpp: unknown option -std=c++20"
    assert str(caught.value).startswith(said)
    assert list((tmp_path / "cache" / "megatron-simulated-device").iterdir()) == []


def test_it_is_too_late_once_torch_is_imported() -> None:
    import torch  # noqa: F401

    with pytest.raises(NotSimulatedError, match="torch was imported before"):
        load()


def test_all_that_the_packages_ask_of_torch_cuda_is_simulated() -> None:
    import torch
    from simulated_device.functions import functions

    packages = Path(__file__).parents[2] / "packages"
    nodes = (
        node
        for path in packages.glob("*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    asked = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
    }
    real = {name: getattr(torch.cuda, name) for name in asked}
    assert len(real) >= 8
    with functions(cast("Any", SimpleNamespace(waits_for=None))):
        assert [name for name in sorted(asked) if getattr(torch.cuda, name) is real[name]] == []
        assert torch.cuda.get_device_properties("cuda").total_memory > 1 << 28
