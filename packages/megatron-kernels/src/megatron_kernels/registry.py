"""One operation, several backends: which one runs, and why.

An `Op` is a public function and the tuple of backends that can carry it out, most wanted first. A
call takes the first backend that does not refuse its arguments; a caller that names a backend gets
that one or a `KernelError` with the reason, never a silent substitute. Nothing is registered at run
time and nothing is remembered between calls: the choice is a pure function of the arguments.

    @op(
        Backend("torch", fused, accept_all, "F.gelu"),
        Backend("reference", reference, accept_all, "plain torch"),
    )
    def gelu(x, approximate="none", *, backend="auto"):
        return gelu.run(backend, x, approximate)

The decorated function is the signature that every backend shares: it is what callers, type
checkers, documentation and run-time shape checks see. Its body passes the arguments by position.
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from megatron_kernels.errors import KernelError

P = ParamSpec("P")
R = TypeVar("R")

AUTO = "auto"


@dataclass(frozen=True)
class Backend:
    """One way of carrying out an operation.

    Attributes:
        name: What a caller asks for, for example `"torch"`.
        run: The implementation; takes the operation's arguments by position.
        refusal: Takes the same arguments; None when `run` can serve them, otherwise the reason it
            cannot. It is asked at every call, so it only looks at devices, dtypes and shapes.
        about: What it is, for people.
    """

    name: str
    run: Callable[..., Any]
    refusal: Callable[..., str | None]
    about: str


@dataclass(frozen=True)
class Verdict:
    """What one backend says to one set of arguments: `refusal` is None when it would serve them."""

    backend: str
    refusal: str | None
    about: str


@dataclass(frozen=True)
class Choice:
    """The outcome of a request: the backend that would run, and what every backend said.

    `backend` is None when the request cannot be served. `str()` gives a small table for people.
    """

    op: str
    request: str
    backend: str | None
    verdicts: tuple[Verdict, ...]

    @property
    def reason(self) -> str:
        """Why this backend was taken, or why none was, in one line."""
        refused = [f"{v.backend}: {v.refusal}" for v in self.verdicts if v.refusal is not None]
        if self.backend is None:
            return "; ".join(refused)
        if self.request != AUTO:
            return "requested"
        names = [v.backend for v in self.verdicts]
        passed_over = refused[: names.index(self.backend)]
        return "; ".join(passed_over) if passed_over else "first choice"

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend or 'no backend'} (request: {self.request})"]
        for verdict in self.verdicts:
            mark = ">" if verdict.backend == self.backend else " "
            says = "can run" if verdict.refusal is None else f"cannot: {verdict.refusal}"
            lines.append(f" {mark} {verdict.backend:<10} {says}  [{verdict.about}]")
        return "\n".join(lines)


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """An operation that is called like a function and can say which backend it would use.

    Attributes:
        signature: The public function; its body hands over to `run`.
        backends: Most wanted first. The last one is the reference, which refuses nothing valid.
    """

    signature: Callable[P, R]
    backends: tuple[Backend, ...]

    def __post_init__(self) -> None:
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

    def run(self, request: str, *args: Any) -> R:
        """Carries out the operation with the backend that `request` selects ("auto" or a name).

        Raises:
            KernelError: The named backend does not exist or refuses these arguments.
        """
        out: R
        if request == AUTO:
            for candidate in self.backends:
                if candidate.refusal(*args) is None:
                    out = candidate.run(*args)
                    return out
            refusals = "; ".join(f"{b.name}: {b.refusal(*args)}" for b in self.backends)
            raise KernelError(f"{self.name}: no backend takes these arguments: {refusals}")
        backend = self.backend(request)
        refusal = backend.refusal(*args)
        if refusal is not None:
            raise KernelError(f"{self.name}: backend {request!r} cannot run here: {refusal}")
        out = backend.run(*args)
        return out

    def backend(self, name: str) -> Backend:
        """Returns the backend of that name.

        Raises:
            KernelError: There is none; the message names the nearest.
        """
        for candidate in self.backends:
            if candidate.name == name:
                return candidate
        names = [candidate.name for candidate in self.backends]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        raise KernelError(f"{self.name} has no backend {name!r}; {hint}")

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Choice:
        """Which backend a call with these arguments would use, and what each says to them."""
        bound = inspect.signature(self.signature).bind(*args, **kwargs)
        bound.apply_defaults()
        request = str(bound.arguments.pop("backend"))
        values = tuple(bound.arguments.values())
        verdicts = tuple(Verdict(b.name, b.refusal(*values), b.about) for b in self.backends)
        if request != AUTO:
            self.backend(request)
        able = [v.backend for v in verdicts if v.refusal is None and request in (AUTO, v.backend)]
        return Choice(self.name, request, able[0] if able else None, verdicts)


def accept_all(*_: Any) -> str | None:
    """Returns the `refusal` of a backend that runs everywhere."""
    return None


def op(*backends: Backend) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Makes a public function an operation over these backends, most wanted first."""

    def decorate(signature: Callable[P, R]) -> Op[P, R]:
        return Op(signature, backends)

    return decorate
