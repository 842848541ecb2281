"""Operations with several backends, and the choice between them.

An `Op` is a public function with a tuple of backends in order of preference. A call uses the first
backend that supports its arguments. A caller may name a backend, or several ("torch,tiles"), and
then gets the first of them that supports the call, or a `KernelError` with the reasons, never a
silent substitute. A backend with a reason in `on_request` runs only for callers that name it, such
as one that this project has never run on its hardware. Nothing is registered at run time and
nothing is cached between calls: the choice is a pure function of the arguments.

    @op(
        Backend("torch", fused, accept_all, "F.gelu"),
        Backend("reference", reference, accept_all, "plain torch"),
    )
    def gelu(x, approximate="none", *, backend="auto"):
        return gelu.run(backend, x, approximate)

The decorated function defines the signature of all backends, which callers, type checkers,
documentation and run-time shape checks see. Its body passes the arguments by position, or
an object that it makes of them (`Op.given`).
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch

from megatron_kernels.errors import KernelError

P = ParamSpec("P")
R = TypeVar("R")

AUTO = "auto"

NEVER_RUN: Final = "never run on a GPU by this project"
"""Label of a backend that is tested without its hardware only."""


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        name: Name by which a caller requests it, for example `"torch"`.
        run: The implementation; takes by position what `Op.given` returns: the operation's
            arguments, unless the operation makes an object of them.
        unsupported_reason: Takes the same arguments. Returns None if `run` supports them, otherwise
            the reason. It is called at every call, so it only looks at devices, dtypes and shapes.
        description: A short description for users.
        on_request: Why only a call that names the backend uses it, such as `NEVER_RUN`. None if
            other calls may use it too.
        fuses: Whether it computes the operation in one kernel each way. Programs then call an
            operation that stands for several others (`megatron_kernels.fuses_on`). In code
            compiled by torch.compile, which fuses operations itself, only a call that names the
            backend uses it.
    """

    name: str
    run: Callable[..., Any]
    unsupported_reason: Callable[..., str | None]
    description: str
    on_request: str | None = None
    fuses: bool = False


@dataclass(frozen=True)
class BackendStatus:
    """Whether one backend supports a set of arguments.

    Attributes:
        backend: Name of the backend.
        unsupported_reason: Why the backend does not support the arguments; None if it does.
        description: Description of the backend.
        on_request: Why only a call that names the backend uses it; None if others may use it too.
    """

    backend: str
    unsupported_reason: str | None
    description: str
    on_request: str | None = None

    @property
    def skipped_reason(self) -> str | None:
        """Why a call that names no backend does not use this one; None if it can."""
        if self.unsupported_reason is None and self.on_request is not None:
            return f"on request only, {self.on_request}"
        return self.unsupported_reason


@dataclass(frozen=True)
class BackendChoice:
    """The backend that a call would use, and the status of every backend.

    `str()` formats it as a small table.

    Attributes:
        op: Name of the operation.
        requested: The request: "auto", or names of backends.
        backend: The backend that the call would use; None if no backend can run it.
        statuses: Status of every backend, in order of preference.
    """

    op: str
    requested: str
    backend: str | None
    statuses: tuple[BackendStatus, ...]

    @property
    def reason(self) -> str:
        """Why this backend was chosen, or why none was, in one line."""
        statuses = {status.backend: status for status in self.statuses}
        if self.requested == AUTO:
            reasons = {name: status.skipped_reason for name, status in statuses.items()}
        else:
            names = [name for name in self.requested.split(",") if name in statuses]
            reasons = {name: statuses[name].unsupported_reason for name in names}
        skipped = list(takewhile(lambda each: each[0] != self.backend, reasons.items()))
        if skipped:
            return "; ".join(f"{name}: {reason}" for name, reason in skipped)
        return "first choice" if self.requested == AUTO else "requested"

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend or 'no backend'} (request: {self.requested})"]
        for status in self.statuses:
            mark = ">" if status.backend == self.backend else " "
            reason = status.unsupported_reason
            text = "can run" if reason is None else f"cannot: {reason}"
            label = "" if status.on_request is None else f"; on request only, {status.on_request}"
            lines.append(f" {mark} {status.backend:<15} {text}  [{status.description}{label}]")
        return "\n".join(lines)


def _unchanged(*arguments: Any) -> tuple[Any, ...]:
    return arguments


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """An operation that is called like a function and explains which backend it uses.

    Attributes:
        signature: The public function; its body calls `run`.
        backends: Backends in order of preference. The last is the reference, which supports all
            valid arguments.
        given: Returns what backends take, for the operation's arguments by position. Defaults to
            these arguments.
        automatic: Those that calls use which name none.
        transparent: Those of them that calls in code compiled by torch.compile use.
    """

    signature: Callable[P, R]
    backends: tuple[Backend, ...]
    given: Callable[..., tuple[Any, ...]] = _unchanged
    automatic: tuple[Backend, ...] = field(init=False, repr=False, compare=False)
    transparent: tuple[Backend, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        automatic = tuple(backend for backend in self.backends if backend.on_request is None)
        object.__setattr__(self, "automatic", automatic)
        transparent = tuple(backend for backend in automatic if not backend.fuses)
        object.__setattr__(self, "transparent", transparent)
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            object.__setattr__(self, name, getattr(self.signature, name))
        object.__setattr__(self, "__wrapped__", self.signature)  # for inspect.signature and help()

    @property
    def name(self) -> str:
        """The name of the public function."""
        return self.signature.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the public function."""
        return self.signature(*args, **kwargs)

    def run(self, requested: str, *args: Any) -> R:
        """Runs the operation with the first requested backend that supports the arguments.

        Args:
            requested: "auto", the name of a backend, or several names with commas between them.
            *args: What backends take (`given`).

        Raises:
            KernelError: A named backend does not exist, or none supports these arguments.
        """
        for candidate in self._candidates(requested):
            if candidate.unsupported_reason(*args) is None:
                out: R = candidate.run(*args)
                return out
        reasons = self._choice(requested, args).reason
        if requested == AUTO:
            raise KernelError(f"{self.name}: no backend supports these arguments: {reasons}")
        raise KernelError(f"{self.name} cannot use backend {reasons}")

    def _candidates(self, requested: str) -> tuple[Backend, ...]:
        """Returns the backends that a request may use, preferred first."""
        if requested != AUTO:
            return self.named(requested)
        # The compiler fuses plain operations itself, and cannot look into these.
        return self.transparent if torch.compiler.is_compiling() else self.automatic

    def named(self, requested: str) -> tuple[Backend, ...]:
        """Returns the backends of a request such as "torch" or "torch,tiles".

        Raises:
            KernelError: No backend has one of the names; the message suggests the nearest.
        """
        return tuple(self.backend(name) for name in requested.split(","))

    def backend(self, name: str) -> Backend:
        """Returns the backend with a name.

        Raises:
            KernelError: No backend has this name; the message suggests the nearest.
        """
        for candidate in self.backends:
            if candidate.name == name:
                return candidate
        names = [candidate.name for candidate in self.backends]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        raise KernelError(f"{self.name} has no backend {name!r}; {hint}")

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> BackendChoice:
        """Returns which backend a call with these arguments would use, and why."""
        bound = inspect.signature(self.signature).bind(*args, **kwargs)
        bound.apply_defaults()
        requested = str(bound.arguments.pop("backend"))
        values = tuple(bound.arguments.values())
        return self._choice(requested, self.given(*values))

    def _choice(self, requested: str, values: tuple[Any, ...]) -> BackendChoice:
        statuses = {
            b.name: BackendStatus(
                b.name, b.unsupported_reason(*values), b.description, b.on_request
            )
            for b in self.backends
        }
        usable = (
            b.name
            for b in self._candidates(requested)
            if statuses[b.name].unsupported_reason is None
        )
        return BackendChoice(self.name, requested, next(usable, None), tuple(statuses.values()))


def accept_all(*_: Any) -> str | None:
    """Returns None: the `unsupported_reason` of a backend that supports everything."""
    return None


def op(
    *backends: Backend, given: Callable[..., tuple[Any, ...]] = _unchanged
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Returns a decorator that makes a function an operation over backends.

    Args:
        *backends: Backends, preferred first.
        given: Returns what they take, for the operation's arguments. Defaults to these.
    """

    def decorate(signature: Callable[P, R]) -> Op[P, R]:
        return Op(signature, backends, given)

    return decorate
