"""Which optional libraries are here, and if one is not usable, why.

Looking never imports the library, so a broken installation cannot break this package.
"""

import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from megatron_kernels.errors import KernelError


@dataclass(frozen=True)
class Library:
    """An optional library: how to find it and what it needs.

    Attributes:
        name: As users know it, and the name of the extra that installs it if there is one.
        module: What is imported.
        minimum: Oldest version whose interface the backends here were written for; () for any.
        install_hint: How to get it.
        required_submodule: A submodule that tells it from other projects of the same name.
        cuda: Whether it is of use only with a CUDA device.
    """

    name: str
    module: str
    minimum: tuple[int, ...]
    install_hint: str
    required_submodule: str | None = None
    cuda: bool = True


@dataclass(frozen=True)
class Availability:
    """The state of one library here: `reason` is None when it is usable."""

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
        "transformer-engine",
        "transformer_engine",
        (2, 0),
        "pip install megatron-kernels[transformer-engine]",
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
        KernelError: It is not one of `LIBRARIES`.
    """
    for candidate in LIBRARIES:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in LIBRARIES)
    raise KernelError(f"no optional library {name!r}; known are {known}")


def probe(wanted: Library) -> Availability:
    """Look for one library: installed, the right project, new enough, with a device to run on."""
    if importlib.util.find_spec(wanted.module) is None:
        return Availability(wanted.name, None, f"not installed ({wanted.install_hint})")
    if wanted.required_submodule is not None and not _exists(wanted.required_submodule):
        reason = f"the installed {wanted.module!r} is another project ({wanted.install_hint})"
        return Availability(wanted.name, None, reason)
    version = _version(wanted)
    if wanted.minimum and version is not None and _numbers(version) < wanted.minimum:
        needed = ".".join(map(str, wanted.minimum))
        return Availability(wanted.name, version, f"too old, {needed} or newer is needed")
    if wanted.cuda:
        import torch

        if not torch.cuda.is_available():
            return Availability(wanted.name, version, "no CUDA device")
    return Availability(wanted.name, version, None)


def library_availability() -> tuple[Availability, ...]:
    """Returns the state of every optional library."""
    return tuple(probe(wanted) for wanted in LIBRARIES)


@functools.cache
def unavailable_reason(name: str) -> str | None:
    """Returns why the named library cannot be used, None when it can.

    Cached, because backends ask at every call: a library installed meanwhile counts in the next
    process.
    """
    found = probe(library(name))
    return None if found.reason is None else f"{name} is {found.reason}"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _version(wanted: Library) -> str | None:
    for distribution in (wanted.name, wanted.module):
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
