"""The device guard for a machine without a GPU: its compilation, its errors, its coverage."""

import ast
import ctypes
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_parallel.imagined import NoGuardError, guard, load_guard

PACKAGES = Path(__file__).parents[2]


@pytest.fixture
def torch_folder(tmp_path, monkeypatch):
    """Returns the folder of torch; the cache is empty and no program is on the path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def test_a_missing_compiler_is_reported(torch_folder):
    with pytest.raises(NoGuardError, match=r"no C\+\+ compiler; install one of c\+\+, g\+\+, cl"):
        guard._compiled(torch_folder)


def test_a_failing_compiler_is_reported_with_its_output(torch_folder, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'unknown option -std=c++20' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(NoGuardError) as caught:
        guard._compiled(torch_folder)
    expected = f"{os.fspath(compiler)} cannot compile guard.cpp: unknown option -std=c++20"
    assert str(caught.value).startswith(expected)
    assert list((tmp_path / "cache" / "megatron-parallel").iterdir()) == []


COMPILER = """#!/bin/sh
echo "$@" > "$0.line"
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


def test_the_guard_is_compiled_once_for_each_torch(torch_folder, tmp_path, monkeypatch):
    compiler = tmp_path / "clang++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    library = guard._compiled(torch_folder)
    assert library.parent == tmp_path / "cache" / "megatron-parallel"
    assert library.read_text() == "compiled\n" and list(library.parent.iterdir()) == [library]
    line = (tmp_path / "clang++.line").read_text()
    assert f"-I{torch_folder}/include " in line and f"-L{torch_folder}/lib -ltorch_cpu" in line
    compiler.unlink()
    assert guard._compiled(torch_folder) == library
    with pytest.raises(NoGuardError, match="no C"):
        guard._compiled(torch_folder.parent)  # another torch
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    with pytest.raises(NoGuardError, match="no C"):
        guard._compiled(torch_folder)
    (tmp_path / "home" / ".cache" / "megatron-parallel").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "megatron-parallel" / library.name).touch()
    assert guard._compiled(torch_folder).parents[2] == tmp_path / "home"


class Driver:
    """A CUDA driver with results of its two functions."""

    def __init__(self, started, asked, devices):
        self.started, self.asked, self.devices = started, asked, devices

    def cuInit(self, flags):  # noqa: N802
        assert flags == 0
        return self.started

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.devices
        return self.asked


@pytest.mark.parametrize(
    ("results", "found"),
    [((0, 0, 1), True), ((0, 0, 0), False), ((1, 0, 1), False), ((0, 1, 1), False)],
)
def test_a_gpu_is_what_a_working_driver_reports(monkeypatch, results, found):
    monkeypatch.setattr(guard.ctypes, "CDLL", lambda name: Driver(*results))
    assert guard._has_gpu() == found


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(guard.ctypes, "CDLL", missing)
    assert guard._has_gpu() is False


@pytest.mark.parametrize("with_cuda", [False, True])
def test_libraries_are_loaded_for_all_and_failures_are_reported(tmp_path, monkeypatch, with_cuda):
    """As in a process that has not imported torch."""
    library = tmp_path / "torch" / "lib"
    library.mkdir(parents=True)
    if with_cuda:
        (library / "libtorch_cuda.so").touch()
    loaded, broken = [], []

    def load(path, mode):
        assert mode == ctypes.RTLD_GLOBAL
        if broken:
            raise OSError("undefined symbol")
        loaded.append(Path(path).name)

    present = [True]
    monkeypatch.setattr(guard, "guard_loaded", lambda: False)
    monkeypatch.setattr(guard, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(guard, "_has_gpu", lambda: present[0])
    monkeypatch.setattr(guard, "_compiled", lambda folder: folder / "guard.so")
    monkeypatch.setattr(guard.ctypes, "CDLL", load)
    spec = SimpleNamespace(origin=os.fspath(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(guard, "find_spec", lambda name: spec)
    if with_cuda:
        with pytest.raises(NoGuardError, match="this machine has a GPU, for which torch has"):
            guard.load_guard()
        present[0] = False
    guard.load_guard()
    expected = ["libtorch_cpu.so", *["libtorch_cuda.so"] * with_cuda, "guard.so"]
    assert loaded == expected
    broken.append(True)
    with pytest.raises(NoGuardError, match="a library cannot be loaded: undefined symbol"):
        guard.load_guard()
    for absent in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(guard, "find_spec", lambda name, absent=absent: absent)
        with pytest.raises(NoGuardError, match="torch is not installed"):
            guard.load_guard()
    monkeypatch.setattr(guard, "guard_loaded", lambda: True)
    guard.load_guard()  # does nothing
    assert loaded == expected


def test_loading_after_torch_is_refused():
    import torch  # noqa: F401

    if guard.guard_loaded():
        pytest.skip("this process has the guard")
    with pytest.raises(NoGuardError, match="torch was imported before"):
        load_guard()


DRIVER = "int cuInit(unsigned f) {{return 0;}} int cuDeviceGetCount(int *n) {{*n = {}; return 0;}}"


@pytest.mark.parametrize("count", [0, 1])
def test_a_gpu_is_found_by_its_driver(tmp_path, count):
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")  # to build a driver that finds this many devices
    (tmp_path / "driver.c").write_text(DRIVER.format(count))
    line = [compiler, "-shared", "-fPIC", "driver.c", "-o", "libcuda.so.1"]
    subprocess.run(line, check=True, cwd=tmp_path)
    program = "from megatron_parallel.imagined import guard; print(guard._has_gpu())"
    environment = {**os.environ, "LD_LIBRARY_PATH": os.fspath(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stdout == f"{count > 0}\n"


def test_all_uses_of_torch_cuda_in_the_packages_are_replaced():
    import torch
    from megatron_parallel.imagined.functions import Queue, cuda_functions

    nodes = (
        node
        for path in PACKAGES.glob("*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
    }
    real = {name: getattr(torch.cuda, name) for name in used}
    assert len(real) >= 8
    with cuda_functions("a device", 1 << 30, lambda what: None, Queue()):
        assert [name for name in sorted(used) if getattr(torch.cuda, name) is real[name]] == []
        assert torch.cuda.get_device_properties("cuda").total_memory == 1 << 30


def test_an_event_is_reached_later_and_reading_it_before_is_a_wait():
    import torch
    from megatron_parallel.imagined.functions import BEHIND, POLLED, Queue, cuda_functions

    queue, waits = Queue(), []

    def wait(what):
        queue.drain()
        waits.append(what)

    with cuda_functions("a device", 1 << 30, wait, queue):
        events = [torch.cuda.Event() for _ in range(3)]
        for event in events:
            queue.queued += BEHIND
            event.record()
        events[0].synchronize()  # many operations later
        assert waits == []
        assert all(events[1].query() for _ in range(BEHIND))
        assert sum(not events[2].query() for _ in range(BEHIND)) == BEHIND // POLLED - 1
        events[2].record()
        events[2].synchronize()
        events[2].synchronize()
        assert waits == ["event"]


ON_CUDA = '''
from megatron_parallel.imagined import NoGuardError, load_guard
try:
    load_guard()
except NoGuardError as error:
    print("no guard:", error)
    raise SystemExit
import torch
from megatron_parallel import HostCopy
from megatron_parallel.imagined import imagined_device
from torch.nn import functional
with imagined_device("cuda") as ledger:
    weight = torch.ones(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    host = torch.arange(512.0).view(2, 256)
    total = float(host.sum())
    ledger.clear()
    x = host.to("cuda")
    y = functional.rms_norm(x.to(torch.bfloat16), (256,)) @ weight.t()
    q = y.view(1, 2, 4, 16).transpose(1, 2)
    out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    out.sum().backward()
    bool(weight.grad.isfinite().all())
    assert not bool(HostCopy(weight.grad.isfinite().all()).read())  # waits, and has no value
    copy = HostCopy(weight.grad)
    for _ in range(120):
        weight.grad.add_(1)
    copy.read()
print(total, dict(ledger.blocking_copies), len(ledger.waits), ledger.kernels["_fused_rms_norm"],
      ledger.kernels["_scaled_dot_product_flash_attention_backward"], weight.grad.shape)


def counted(act):
    """Returns the result, the kernels and the element-wise bytes."""
    ledger.clear()
    result = act()
    return result, dict(ledger.kernels), ledger.bytes_moved.total()


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)


FLASH, EFFICIENT = (f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient"))
with imagined_device("cuda") as ledger:
    assert torch.cuda.get_device_properties(0).total_memory == 80 << 30
    x, weight, n = tensor(3, 256), tensor(256), 3 * 256 * 2
    y, *found = counted(lambda: functional.silu(x))
    assert found == [{"silu": 1}, 2 * n], found
    grad = torch.empty_like(y)
    _, *found = counted(lambda: torch.autograd.grad(y, x, grad))
    assert found == [{"silu_backward": 1}, 3 * n], found
    y, *found = counted(lambda: functional.rms_norm(x, (256,), weight))
    assert found == [{"_fused_rms_norm": 1}, 2 * n + 2 * 256 + 4 * 3], found
    _, *found = counted(lambda: torch.autograd.grad(y, [x, weight], grad))
    assert found == [{"_fused_rms_norm_backward": 1}, 3 * n + 2 * 2 * 256 + 4 * 3], found

    attend = functional.scaled_dot_product_attention
    q, k, v = tensor(1, 8, 4, 16), tensor(1, 2, 4, 16), tensor(1, 2, 4, 16)
    y, kernels, _ = counted(lambda: attend(q, k, v, is_causal=True, enable_gqa=True))
    assert kernels == {FLASH: 1} and ledger.flops == 2 * (2 * 8 * 4 * 4 * 16), kernels
    grad = torch.empty_like(y)
    _, kernels, _ = counted(lambda: torch.autograd.grad(y, [q, k, v], grad))
    assert kernels[f"{FLASH}_backward"] == 1 and kernels["sum"] == 2, kernels
    wide = [t.detach().float() for t in (q, k, v)]
    mask = torch.ones(4, 4, dtype=torch.bool, device="cuda")
    for given in (lambda: attend(*wide, enable_gqa=True), lambda: attend(q, q, q, mask),
                  lambda: attend(q, q, tensor(1, 8, 4, 8))):
        y, kernels, _ = counted(given)
        assert kernels[EFFICIENT] == 1 and FLASH not in kernels, kernels
    _, kernels, _ = counted(lambda: attend(*(t.double() for t in wide), enable_gqa=True))
    assert not {FLASH, EFFICIENT} & {*kernels}, kernels

    ledger.clear()
    torch.cuda.synchronize()
    x.detach().cpu()
    x.detach().to("cpu", non_blocking=True)
    causes = [cause.partition(" at ")[0] for cause in ledger.waits.elements()]
    assert causes == ["synchronize", "copy to the host"], causes
    before = ledger.storages.live
    one = torch.empty(1, device="cuda")
    assert ledger.storages.live - before == 512
'''


def test_an_imagined_cuda_device_runs_kernels_of_cuda_and_counts_waits_and_copies(tmp_path):
    """Runs in a process of its own, since the guard has to be loaded before torch."""
    line = [sys.executable, "-c", ON_CUDA]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if done.stdout.startswith("no guard:"):
        pytest.skip(done.stdout.strip())
    assert done.stdout.startswith("130816.0 {'outside of the packages': 1} 2 1 1 torch.Size([64, ")
