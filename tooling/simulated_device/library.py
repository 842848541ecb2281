"""Compiling `guard.cpp` for the torch that is installed, once, and loading it before torch is."""

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
    """This machine cannot simulate a device; the line says why."""


def load() -> None:
    """Register the guard and the hooks, for the rest of this process.

    torch looks for hooks once, when it is imported: call this before.

    Raises:
        NotSimulatedError: torch is imported or has CUDA of its own, or there is no compiler.
    """
    if "torch" in sys.modules:
        raise NotSimulatedError("torch was imported before the simulated device was loaded")
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise NotSimulatedError("torch is not installed")
    folder = Path(found.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise NotSimulatedError("torch is built for CUDA here, which has a guard of its own")
    compiled = _compiled(folder)
    ctypes.CDLL(os.fspath(folder / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.fspath(compiled), ctypes.RTLD_GLOBAL)


def _compiled(torch: Path) -> Path:
    """The library, from the user's cache if it was compiled before for this torch."""
    given = f"{torch} {version('torch')} {FLAGS}".encode() + SOURCE.read_bytes()
    key = hashlib.blake2b(given, digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "megatron-simulated-device" / f"guard-{key}.so"
    if target.exists():
        return target
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotSimulatedError(f"there is no C++ compiler: none of {', '.join(COMPILERS)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        include = torch / "include"
        line = [compiler, *FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        line += [os.fspath(SOURCE), "-o", os.fspath(made)]
        line += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(line, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NotSimulatedError(
                f"{compiler} cannot compile {SOURCE.name}: {done.stderr[-300:]}"
            )
        made.replace(target)
    return target
