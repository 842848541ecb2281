"""Reports what a rank waited for when the pipeline broke, in one line that names the rank at fault.

A backend reports only that a connection broke or that no answer came within the time-out.
`PipelineMonitor` records what the stages of this rank compute, send and wait for. When a wait
fails, the rank writes to the job's store which rank it waited for. If that rank waited for another
one, its line is passed on, so the ranks of a long pipeline name the rank at fault and not their
neighbour. After a time-out this is best effort: a rank looks for other reports for two seconds.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron_parallel.collectives.failure import GRACE, failure_reported, report_failure
from megatron_parallel.errors import CollectiveError, backend_text
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.mesh.store import BoundedStore, default_store
from megatron_parallel.pipeline.order import Action

SHORT_GRACE: Final = 0.2
"""Seconds to wait for the report of a rank whose connection broke; it reports before it exits."""


class PeerError(CollectiveError):
    """Another rank of the pipeline died, froze or failed; the job must end."""


class PendingMessage(NamedTuple):
    """A message that this rank waits for: its content, its micro-batch and the other stage."""

    what: str
    micro_batch: int
    peer: int  # stage
    receives: bool  # whether this rank receives it


class _Report(NamedTuple):
    line: str
    peer: int | None  # the rank that this one waited for
    number: int = 0  # in the order in which ranks detected the failure


@dataclass(frozen=True)
class _WatchedMessage:
    """A message from another stage that a `Watchdog` watches."""

    monitor: "PipelineMonitor"
    axis: Axis
    wait: PendingMessage
    rank: int

    @property
    def axis_name(self) -> str:
        """Name of the axis."""
        return self.axis.name

    @property
    def description(self) -> str:
        """The message and the rank that sends it."""
        wait = self.wait
        return f"receive of the {wait.what} of micro-batch {wait.micro_batch} from rank {self.rank}"

    def failure_reported(self) -> bool:
        """Returns whether a rank of the mesh has reported a failure."""
        return failure_reported(self.axis)

    def diagnose(self, cause: str) -> str:
        """Returns the line that names the rank at fault."""
        return self.monitor.diagnose_message(self.wait, cause)


class PipelineMonitor:
    """Records the passes of one rank in this step, and the message that it waits for.

    Args:
        mesh: The mesh of this rank.
        stages: Number of stages.
        before_pass: Called before each pass; may raise.

    Attributes:
        trace: The passes in the order in which they completed.
    """

    def __init__(self, mesh: Mesh, stages: int, before_pass: Callable[[], None]) -> None:
        self._before_pass = before_pass
        self.trace: list[Action] = []
        self._mesh = mesh
        self._axis = mesh.axis("pp")
        self._holder = mesh.layout.pipeline_rank_of
        self._stages = stages
        self._plan: Sequence[Action] = ()
        self._wait: PendingMessage | None = None
        self._sent: PendingMessage | None = None
        self._depth = 0
        self._pair: list[Action] | None = None
        self._awaited: Action | None = None
        store = default_store()
        turn = store.add(f"pipeline/engines/{mesh.rank}/{self._axis.ranks}", 1)
        self._topic = f"pipeline/failures/{self._axis.ranks}/{turn}"

    @property
    def in_user_code(self) -> bool:
        """Whether code of the model or the loss is running, so that an error is this rank's own."""
        return self._depth > 0

    def begin(self, plan: Sequence[Action]) -> None:
        """Starts a step.

        `plan` is required if a rank posts receives ahead of the pass that runs next.
        """
        self.trace = []
        self._plan, self._wait, self._sent, self._depth = plan, None, None, 0
        self._pair = self._awaited = None

    @contextmanager
    def running(self, action: Action | None = None) -> Iterator[None]:
        """Returns a context around code of the model (`action`) or the loss (None)."""
        if action is not None:
            self._mark(action)
        self._depth += 1
        yield
        self._depth -= 1  # not after an error: `in_user_code` shows where the error came from
        if action is not None:
            (self.trace if self._pair is None else self._pair).append(action)
            self._wait = self._earlier_send(action)

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Returns a context around two passes that alternate; both complete with the later one."""
        self._pair = []
        yield
        self.trace += sorted(self._pair, key=lambda action: action.kind, reverse=True)
        self._pair = None

    @contextmanager
    def awaiting(self, action: Action) -> Iterator[None]:
        """Returns a context around a wait for the input of a pass that is not next in the plan."""
        self._awaited = action
        yield
        self._awaited = None

    def expect_receive(self, what: str, micro_batch: int, peer: int) -> None:
        """Records that this rank is about to wait for a tensor of stage `peer`."""
        self._wait = PendingMessage(what, micro_batch, peer, receives=True)

    def expect_send(self, what: str, micro_batch: int, peer: int) -> None:
        """Records that this rank is about to wait until stage `peer` has received a tensor."""
        self._wait = self._sent = PendingMessage(what, micro_batch, peer, receives=False)

    def report_error(self, error: BaseException) -> None:
        """Reports to the other ranks that this rank raised `error` in its own code."""
        text = " ".join(str(error).split())
        line = f"rank {self._mesh.rank} raised {type(error).__name__}: {text}"
        with contextlib.suppress(RuntimeError):  # if the store is gone, `error` matters more
            self._post(default_store(GRACE), _Report(line, None))

    def diagnose(self, error: RuntimeError) -> str:
        """Returns the line for a wait that failed with `error`, after reading the other reports."""
        grace = GRACE if re.search("time[d ]*.?out", str(error), re.IGNORECASE) else SHORT_GRACE
        ahead = (self._next_of_plan() or self._sent) if self._plan else None
        return self._explained(ahead or self._wait, backend_text(error), grace)

    def diagnose_message(self, wait: PendingMessage, cause: str) -> str:
        """Returns the line for a message that has not arrived. May be called from any thread."""
        return self._explained(wait, cause, GRACE)

    def _explained(self, wait: PendingMessage | None, cause: str, grace: float) -> str:
        own = self._report_of(wait, cause)
        try:
            store = default_store(GRACE)
            own = self._post(store, own)
            report_failure(store, self._axis)
            return self._blame(store, own, grace)
        except RuntimeError:
            return f"{own.line}; rank 0, which keeps the job's store, does not respond either"

    def _mark(self, action: Action) -> None:
        """Prepares for a pass: where only the CUDA stream waits for its message, watches that."""
        self._before_pass()
        watchdog, wait = self._axis.watchdog, self._input_of(action)
        if watchdog is not None:
            watchdog.check()
            if wait is not None:
                peer = self._axis.ranks[self._holder(wait.peer)]
                watchdog.watch(_WatchedMessage(self, self._axis, wait, peer))

    def _report_of(self, wait: PendingMessage | None, cause: str) -> _Report:
        me, where = self._mesh.rank, f"on axis {self._axis.name!r}"
        if wait is None:
            return _Report(f"the stages could not connect {where} ({cause})", None)
        peer = self._axis.ranks[self._holder(wait.peer)]
        verb, direction = ("send", "to") if wait.receives else ("receive", "from")
        return _Report(
            f"rank {peer} (stage {wait.peer} of {self._stages}) did not {verb} the {wait.what} of "
            f"micro-batch {wait.micro_batch} {direction} rank {me} {where} ({cause})",
            peer,
        )

    def _blame(self, store: BoundedStore, own: _Report, grace: float) -> str:
        me = self._mesh.rank
        if own.peer is None:
            others = [rank for rank in self._axis.ranks if rank != me]
            silent = [rank for rank in others if self._read(store, rank, grace) is None]
            names = f"{'ranks' if silent[1:] else 'rank'} {', '.join(map(str, silent))}"
            return f"{names} did not respond: {own.line}" if silent else own.line
        chain = {me: own}
        rank: int | None = own.peer
        while rank is not None and rank not in chain:
            theirs = self._read(store, rank, grace)
            if theirs is None:
                break
            chain[rank], rank = theirs, theirs.peer
        # If ranks blame one another, the first report is right.
        in_circle = rank in chain
        cause = min(chain.values(), key=lambda r: r.number) if in_circle else [*chain.values()][-1]
        return own.line if cause is own else f"{cause.line}; rank {me} waited for rank {own.peer}"

    def _earlier_send(self, action: Action) -> PendingMessage | None:
        """Returns the send that a stage waits for after a pass: that of its previous pass."""
        what, peer = ("activations", action.stage + 1)
        if action.kind in ("B", "I"):
            what, peer = ("gradient", action.stage - 1)
        if not 0 <= peer < self._stages:
            return None
        return PendingMessage(what, max(0, action.micro_batch - 1), peer, receives=False)

    def _next_of_plan(self) -> PendingMessage | None:
        if len(self.trace) >= len(self._plan):
            return None
        return self._input_of(self._awaited or self._plan[len(self.trace)])

    def _input_of(self, action: Action) -> PendingMessage | None:
        """Returns the message of another rank that a pass starts with."""
        kind, stage, micro_batch = action
        what, peer = ("activations", stage - 1) if kind == "F" else ("gradient", stage + 1)
        if kind == "W" or not 0 <= peer < self._stages or self._holder(peer) == self._axis.index:
            return None
        return PendingMessage(what, micro_batch, peer, receives=True)

    def _post(self, store: BoundedStore, report: _Report) -> _Report:
        report = report._replace(number=store.add(f"{self._topic}/count", 1))
        store.set(f"{self._topic}/{self._mesh.rank}", json.dumps(report))
        return report

    def _read(self, store: BoundedStore, rank: int, grace: float) -> _Report | None:
        key = f"{self._topic}/{rank}"
        deadline = time.monotonic() + grace
        while not store.check([key]):  # the store's own wait may exceed its time-out
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        return _Report(*json.loads(store.get(key)))
