"""Optional libraries are found without being imported, and a missing one has a reason."""

import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch
from megatron_kernels import KernelError, availability, library_availability
from megatron_kernels._compat import has_gpu, lacks_gpu, missing_gpu_reason, outside_graphs
from megatron_kernels.availability import LIBRARIES, Library, library, probe, unavailable_reason
from megatron_kernels.ops import triton_op
from megatron_kernels.ops.optional import missing_library
from packaging.requirements import Requirement
from torch._subclasses.fake_tensor import FakeTensorMode


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


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.6.9", "too old, 2.7 or newer is needed"),
        ("2.7", None),
        ("2.7.0+cu12", None),
        ("2", "too old, 2.7 or newer is needed"),
        ("2.x.9", "too old, 2.7 or newer is needed"),  # numbers end at the first other part
        ("2.20.9.dev1", None),
        ("2.21", "of an unknown interface, a version below 2.21 is needed"),
        ("3.0.0rc1", "of an unknown interface, a version below 2.21 is needed"),
        ("10.1", "of an unknown interface, a version below 2.21 is needed"),
        (None, None),  # a module without metadata is of any version
    ],
)
def test_versions_are_compared_as_numbers(
    version: str | None, reason: str | None, fake: Path
) -> None:
    install(fake, "some_kernels", version)
    wanted = Library("other-name", "some_kernels", (2, 7), "", cuda=False, below=(2, 21))
    found = probe(wanted)
    assert (found.version, found.reason) == (version, reason)


def test_a_library_is_found_by_the_name_of_its_distribution_or_its_module(fake: Path) -> None:
    for module, name in (("one_module", "some-kernels"), ("two_module", "two-module")):
        (fake / module).mkdir()
        (fake / module / "__init__.py").write_text("")
        info = fake / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        importlib.machinery.PathFinder.invalidate_caches()
        assert probe(Library("some-kernels", module, (), "", cuda=False)).version == "1.5"


def test_a_gpu_is_what_the_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, found in ((lambda: 2, True), (lambda: 1, True), (lambda: 0, False)):
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", count, raising=False)
        assert has_gpu() is found and lacks_gpu() is not found
    monkeypatch.delattr(torch._C, "_cuda_getDeviceCount")  # as in builds without CUDA
    assert not has_gpu() and lacks_gpu()


def test_only_tensors_with_values_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    with FakeTensorMode():
        fake = torch.ones(2)
    for count, reason in ((0, "the driver finds no GPU"), (1, None)):
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda n=count: n, raising=False)
        assert missing_gpu_reason(x) == reason and missing_gpu_reason(fake) is None


def test_versions_and_hints_of_libraries_are_those_of_the_extras_of_the_package() -> None:
    required = [Requirement(each) for each in importlib.metadata.requires("megatron-kernels") or ()]
    for each in LIBRARIES:
        extra = next((r for r in required if r.name == each.name and "test" not in str(r)), None)
        if extra is None:
            assert each.minimum == each.below == () and "github.com" in each.install_hint
            continue
        assert each.install_hint == f"pip install megatron-kernels[{each.name}]"
        assert extra.marker is not None and extra.marker.evaluate({"extra": each.name})
        limits = {s.operator: s.version for s in extra.specifier}
        assert limits.get(">=", "") == ".".join(map(str, each.minimum))
        assert limits.get("<", "") == ".".join(map(str, each.below))


def test_descriptions_of_libraries_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        LIBRARIES[0].minimum = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        library_availability()[0].reason = None  # type: ignore[misc]


def test_an_import_error_is_a_reason_in_one_line(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Library("thing", "broken_kernels", (), "", cuda=False)
    monkeypatch.setattr(availability, "LIBRARIES", (wanted,))
    install(fake, "broken_kernels", "1.0")
    for text, message in (("'first\\nsecond'", "first"), ("", "")):
        (fake / "broken_kernels" / "__init__.py").write_text(f"raise OSError({text})\n")
        importlib.machinery.PathFinder.invalidate_caches()
        unavailable_reason.cache_clear()
        found = unavailable_reason("thing")
        assert found == f"thing is installed but cannot be imported: OSError: {message}"
    (fake / "broken_kernels" / "__init__.py").write_text("# another length of this file\n")
    unavailable_reason.cache_clear()
    assert unavailable_reason("thing") is None and "broken_kernels" in sys.modules
    unavailable_reason.cache_clear()


def test_backends_report_the_library_and_the_reason() -> None:
    reason = unavailable_reason("flash-attn")
    assert reason is None or reason.startswith("flash-attn is ")
    with pytest.raises(KernelError, match="use one of triton, flash-attn"):
        library("flash")


def test_the_compiler_takes_what_a_machine_has_for_a_constant() -> None:
    """By the mark of `torch.compiler.assume_constant_result`."""
    for function in (triton_op.interprets, missing_library, lacks_gpu):
        assert vars(function)["_dynamo_marked_constant"] is True


def test_the_compiler_calls_a_function_outside_graphs_as_it_is() -> None:
    """By the marks of `torch.compiler.disable`."""

    @outside_graphs
    def called() -> int:
        """Says why."""
        return 3

    marks = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": "Says why."}
    assert called() == 3 and marks.items() <= vars(called).items()
