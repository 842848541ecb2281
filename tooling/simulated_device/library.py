"""Compiles `guard.cpp` for the installed torch, once, and loads it before torch."""

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


class NotSimulatedError(RuntimeError):
    """Raised if this machine cannot simulate a device; the message has the reason."""


def load() -> None:
    """Registers the guard and the hooks for the rest of this process.

    Call it before torch is imported, since torch looks for hooks only then.

    Raises:
        NotSimulatedError: torch is imported already or has CUDA, or there is no compiler.
    """
    if "torch" in sys.modules:
        raise NotSimulatedError("torch was imported before the simulated device was loaded")
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise NotSimulatedError("torch is not installed")
    folder = Path(found.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise NotSimulatedError("the installed torch is built for CUDA and has its own guard")
    compiled = _compiled(folder)
    ctypes.CDLL(os.fspath(folder / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.fspath(compiled), ctypes.RTLD_GLOBAL)


def _compiled(torch: Path) -> Path:
    """Returns the library for this torch, from the user's cache if it was compiled before."""
    inputs = f"{torch} {version('torch')} {FLAGS}".encode() + SOURCE.read_bytes()
    key = hashlib.blake2b(inputs, digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "megatron-simulated-device" / f"guard-{key}.so"
    if target.exists():
        return target
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotSimulatedError(f"there is no C++ compiler; install one of {', '.join(COMPILERS)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        library = Path(folder) / target.name
        include = torch / "include"
        line = [compiler, *FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        line += [os.fspath(SOURCE), "-o", os.fspath(library)]
        line += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(line, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NotSimulatedError(
                f"{compiler} cannot compile {SOURCE.name}: {done.stderr[-300:]}"
            )
        library.replace(target)
    return target
