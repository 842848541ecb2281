"""A device guard for "cuda" that does nothing, for a machine without a GPU.

With it, autograd and factories accept tensors on the device "cuda". `guard.cpp` is compiled for the
installed torch on first use (four seconds) and stored in the user's cache.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O1", "-shared", "-fPIC", "-std=c++20", "-D_GLIBCXX_USE_CXX11_ABI=1")


class NoGuardError(RuntimeError):
    """Raised if this process cannot have the guard; the message has the reason."""


def load_guard() -> None:
    """Registers the guard and the hooks for the rest of this process.

    Call it before torch is imported, since torch looks for hooks only then.

    Raises:
        NoGuardError: torch is imported already, there is a GPU, or there is no compiler.
    """
    if guard_loaded():
        return
    if "torch" in sys.modules:
        raise NoGuardError("torch was imported before the device guard was loaded")
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise NoGuardError("torch is not installed")
    folder = Path(found.origin).parent
    library, cuda = (folder / "lib" / f"libtorch_{name}.so" for name in ("cpu", "cuda"))
    if cuda.exists() and _has_gpu():
        raise NoGuardError("this machine has a GPU, for which torch has its own guard")
    compiled = _compiled(folder)
    try:
        for each in (library, cuda, compiled) if cuda.exists() else (library, compiled):
            ctypes.CDLL(os.fspath(each), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NoGuardError(f"a library cannot be loaded: {error}") from None


def _has_gpu() -> bool:
    """Returns whether the CUDA driver finds a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def guard_loaded() -> bool:
    """Returns whether this process has the guard."""
    return hasattr(ctypes.CDLL(None), "megatron_parallel_device_guard")


def _compiled(torch: Path) -> Path:
    """Returns the library for this torch, from the user's cache if it was compiled before."""
    inputs = f"{torch} {version('torch')} {FLAGS}".encode() + SOURCE.read_bytes()
    key = hashlib.blake2b(inputs, digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "megatron-parallel" / f"guard-{key}.so"
    if target.exists():
        return target
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoGuardError(f"there is no C++ compiler; install one of {', '.join(COMPILERS)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        library = Path(folder) / target.name
        include = torch / "include"
        line = [compiler, *FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        line += [os.fspath(SOURCE), "-o", os.fspath(library)]
        line += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(line, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NoGuardError(f"{compiler} cannot compile {SOURCE.name}: {done.stderr[-300:]}")
        library.replace(target)
    return target
