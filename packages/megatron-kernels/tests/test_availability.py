"""Optional libraries are found without being imported, and a missing one has a reason."""

import importlib.machinery
import sys
from pathlib import Path

import pytest
import torch
from megatron_kernels import KernelError, library_availability
from megatron_kernels.availability import LIBRARIES, Library, library, probe, unavailable_reason


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a function that installs a fake library, whose import fails the test."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(folder: Path, module: str, version: str | None) -> None:
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if version is not None:
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n"
        )
    importlib.machinery.PathFinder.invalidate_caches()


def test_every_library_is_reported() -> None:
    assert [found.name for found in library_availability()] == [wanted.name for wanted in LIBRARIES]
    for found in library_availability():
        if found.reason is None:
            assert torch.cuda.is_available()


def test_a_missing_library_is_reported_with_an_install_hint() -> None:
    found = probe(Library("thing", "no_such_thing", (), "pip install thing"))
    assert found.version is None and found.reason == "not installed (pip install thing)"
    assert str(found) == "thing: not usable: not installed (pip install thing)"


def test_an_old_library_is_reported_with_the_minimum_version(fake: Path) -> None:
    install(fake, "old_kernels", "2.6.3.post1")
    found = probe(Library("old-kernels", "old_kernels", (2, 7), "", cuda=False))
    assert (found.version, found.reason) == ("2.6.3.post1", "too old, 2.7 or newer is needed")


def test_new_enough_is_usable_and_never_imported(fake: Path) -> None:
    install(fake, "new_kernels", "2.10.0+cu12")
    found = probe(Library("new-kernels", "new_kernels", (2, 7), "", cuda=False))
    assert found.reason is None and "new_kernels" not in sys.modules
    assert str(found) == "new-kernels 2.10.0+cu12: usable"


def test_without_a_cuda_device_a_cuda_library_is_not_usable(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install(fake, "cuda_kernels", "3.0")
    found = probe(Library("cuda-kernels", "cuda_kernels", (2, 7), ""))
    assert (found.version, found.reason) == ("3.0", "no CUDA device")


def test_another_project_of_the_same_name_is_recognized(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake / "apexlike").mkdir()
    (fake / "apexlike" / "__init__.py").write_text("")
    wanted = Library(
        "apexlike", "apexlike", (), "build it", required_submodule="apexlike.normalization"
    )
    assert probe(wanted).reason == "the installed 'apexlike' is another project (build it)"
    (fake / "apexlike" / "normalization.py").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    importlib.machinery.PathFinder.invalidate_caches()
    assert probe(wanted).reason is None


def test_backends_report_the_library_and_the_reason() -> None:
    reason = unavailable_reason("flash-attn")
    assert reason is None or reason.startswith("flash-attn is ")
    with pytest.raises(KernelError, match="use one of triton, flash-attn"):
        library("flash")
