"""Availability of optional libraries, with the reason if a library is not usable.

A check does not import the library. Only a call that is about to use it does, and reports a broken
installation as a reason too (`unavailable_reason`).
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from importlib.machinery import PathFinder

from megatron_kernels.errors import KernelError


@dataclass(frozen=True)
class Library:
    """An optional library: how it is found and what it needs.

    Attributes:
        name: Name for users, and of the extra that installs it if there is one.
        module: Module that is imported.
        minimum: Oldest version with the interface that the backends use; () for any.
        below: First version whose interface is unknown; () for none.
        install_hint: How to install it.
        required_submodule: A submodule that other projects of the same name lack.
        cuda: Whether it needs a CUDA device.
    """

    name: str
    module: str
    minimum: tuple[int, ...]
    install_hint: str
    required_submodule: str | None = None
    cuda: bool = True
    below: tuple[int, ...] = ()


@dataclass(frozen=True)
class Availability:
    """The state of one library on this machine.

    Attributes:
        name: Name of the library.
        version: Installed version, or None if unknown.
        reason: Why the library is not usable; None if it is usable.
    """

    name: str
    version: str | None
    reason: str | None

    def __str__(self) -> str:
        state = "usable" if self.reason is None else f"not usable: {self.reason}"
        return f"{self.name} {self.version}: {state}" if self.version else f"{self.name}: {state}"


LIBRARIES = (
    Library("triton", "triton", (3, 0), "pip install megatron-kernels[triton]"),
    Library("flash-attn", "flash_attn", (2, 7), "pip install megatron-kernels[flash-attn]"),
    Library(
        "flash-attn-3",
        "flash_attn_interface",
        (),
        "build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    Library(
        "transformer-engine",
        "transformer_engine",
        (2, 10),
        "pip install megatron-kernels[transformer-engine]",
        required_submodule="transformer_engine.pytorch",
        below=(2, 21),
    ),
    Library(
        "apex",
        "apex",
        (),
        "build it from github.com/NVIDIA/apex",
        required_submodule="apex.normalization",
    ),
)


def library(name: str) -> Library:
    """Returns the description of an optional library.

    Raises:
        KernelError: `LIBRARIES` has no library of this name.
    """
    for candidate in LIBRARIES:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in LIBRARIES)
    raise KernelError(f"no optional library {name!r}; use one of {known}")


def probe(description: Library) -> Availability:
    """Checks one library: installed, the right project, recent enough, and with a device."""
    found = probe_installation(description)
    if found.reason is None and description.cuda:
        import torch

        if not torch.cuda.is_available():
            return Availability(description.name, found.version, "no CUDA device")
    return found


def probe_installation(description: Library) -> Availability:
    """Checks one library: installed, the right project, and recent enough."""
    if importlib.util.find_spec(description.module) is None:
        return Availability(description.name, None, f"not installed ({description.install_hint})")
    if description.required_submodule is not None and not _exists(description.required_submodule):
        reason = (
            f"the installed {description.module!r} is another project ({description.install_hint})"
        )
        return Availability(description.name, None, reason)
    version = _version(description)
    if description.minimum and version is not None and _numbers(version) < description.minimum:
        needed = ".".join(map(str, description.minimum))
        return Availability(description.name, version, f"too old, {needed} or newer is needed")
    if description.below and version is not None and _numbers(version) >= description.below:
        limit = ".".join(map(str, description.below))
        reason = f"of an unknown interface, a version below {limit} is needed"
        return Availability(description.name, version, reason)
    return Availability(description.name, version, None)


def library_availability() -> tuple[Availability, ...]:
    """Returns the state of every optional library."""
    return tuple(probe(description) for description in LIBRARIES)


@functools.cache
def unavailable_reason(name: str) -> str | None:
    """Returns why the named library cannot be used, or None if it is imported.

    Called after all other checks, so that only a call that uses the library imports it. The result
    is cached, because backends call this at every call. A library that is installed later is found
    by the next process.
    """
    description = library(name)
    found = probe(description)
    if found.reason is not None:
        return f"{name} is {found.reason}"
    try:
        importlib.import_module(description.required_submodule or description.module)
    except Exception as error:  # noqa: BLE001 - a library built for another torch raises any
        first = next(iter(str(error).splitlines()), "")
        return f"{name} is installed but cannot be imported: {type(error).__name__}: {first}"
    return None


def _exists(module: str) -> bool:
    """Returns whether a submodule exists, without importing the package that it is in."""
    spec = importlib.util.find_spec(module.rpartition(".")[0])
    folders = (spec and spec.submodule_search_locations) or ()
    return PathFinder.find_spec(module, [*folders]) is not None


def _version(description: Library) -> str | None:
    for distribution in (description.name, description.module):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
