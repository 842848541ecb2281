"""Conversion of exceptions to reports for the user: messages and an exit status, or a bug."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence

from megatron_train._command import EXIT_INTERRUPTED, EXIT_USAGE, CommandError, one_line
from megatron_train.errors import SettingsError
from megatron_train.launch.link import FailureReport

_GLOO = re.compile(r"^\[\S*gloo/\S+:\d+\]")
_ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)
_PLACE = re.compile(r"^\[[^\]]*\]\s*")


def failure_report(error: BaseException) -> FailureReport:
    """Returns the report of an exception."""
    if isinstance(error, SettingsError):
        return FailureReport(
            "own", _text([*error.lines, f"{len(error.lines)} settings cannot be used"])
        )
    if isinstance(error, CommandError):
        return FailureReport("own", _text(error.lines), EXIT_USAGE)
    if isinstance(error, KeyboardInterrupt):
        return FailureReport("interrupted", "interrupted", EXIT_INTERRUPTED)
    if isinstance(error, _mistakes()):
        return FailureReport("own", one_line(error))
    if (out_of_memory := _out_of_memory(error)) is not None:
        return out_of_memory
    peer_failure = _lost_peer(error)
    if peer_failure is not None:
        return peer_failure
    last = traceback.format_exception_only(error)[-1]
    return FailureReport(
        "bug", " ".join(last.split()), 1, "".join(traceback.format_exception(error))
    )


def _text(lines: Sequence[str]) -> str:
    return "\n".join(map(one_line, lines))


def _mistakes() -> tuple[type[Exception], ...]:
    """Returns the types of exceptions that the user can cause."""
    from megatron_ckpt import CheckpointError
    from megatron_data import DataError
    from megatron_kernels import KernelError
    from megatron_models import ConfigError
    from megatron_optim import OptimError
    from megatron_parallel import LayoutError

    from megatron_train.errors import TrainError

    ours = (CheckpointError, DataError, KernelError, ConfigError, OptimError, LayoutError)
    return (TrainError, *ours, OSError)


def _out_of_memory(error: BaseException) -> FailureReport | None:
    """Returns the report of an out-of-memory error; None for other errors."""
    if "torch" not in sys.modules and not isinstance(error, MemoryError):
        return None
    from megatron_parallel.memory import is_out_of_memory

    if not is_out_of_memory(error):
        return None
    found = _ASKED.search(str(error))
    size = f" when allocating {found[1]}" if found else ""
    return FailureReport(
        "own",
        f"out of memory{size}: lower --micro-batch-size, --seq-length or the size of the model, "
        "recompute activations (--recompute-granularity full), or shard the model over more ranks",
    )


def _lost_peer(error: BaseException) -> FailureReport | None:
    """Returns the report of failed communication between ranks; None for other errors."""
    if "torch" not in sys.modules:  # nothing has communicated
        return None
    import torch.distributed as dist
    from megatron_parallel import CollectiveError

    gloo = isinstance(error, RuntimeError) and _GLOO.match(str(error)) is not None
    if not (isinstance(error, CollectiveError | dist.DistError) or gloo):
        return None
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    in_use = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
    if in_use or "EADDRINUSE" in f"{error} {error.__cause__}":
        return FailureReport(
            "port", f"{address} (MASTER_ADDR:MASTER_PORT) is in use; choose another port"
        )
    message = one_line(error)
    if not isinstance(error, CollectiveError):
        message = "communication failed: " + _PLACE.sub("", str(error).strip().split("\n")[0])
    if not dist.is_initialized():
        message = f"start-up of axis 'world' at {address}: {message}"
    return FailureReport("peer", message)
