"""Starts ranks, supervises them and returns the outcome."""

import os
import sys
from collections.abc import Mapping, Sequence

from megatron_train.launch.environment import free_port, rank_environment, usable_cores
from megatron_train.launch.outcome import LaunchOutcome, launch_outcome
from megatron_train.launch.process import RankProcess
from megatron_train.launch.supervisor import GRACE, Supervisor

_ATTEMPTS = 5
"""Attempts to start: another process may take the free port before rank 0 listens on it."""


def launch(
    program: Sequence[str],
    arguments: Sequence[str],
    ranks: int,
    *,
    grace: float = GRACE,
    timeout: float | None = None,
    defaults: Mapping[str, str] | None = None,
) -> LaunchOutcome:
    """Runs a program as several ranks on this machine and waits until all of them have ended.

    The command line of a rank is ``program LINK SCREEN arguments...``. LINK is the file descriptor
    of the rank's `ParentLink`. SCREEN is the file descriptor of this process's standard error for
    rank 0 and ``-`` for the other ranks.

    Args:
        program: First words of the command line.
        arguments: Last words of the command line.
        ranks: Number of ranks.
        grace: Seconds, see `Supervisor`.
        timeout: Seconds, see `Supervisor`.
        defaults: Environment variables of the ranks, unless this process has them.
    """
    base = {**(defaults or {}), **os.environ}
    threads = max(1, usable_cores() // ranks)
    if "OMP_NUM_THREADS" not in os.environ:
        plural = "thread" if threads == 1 else "threads"
        sys.stdout.write(f"{ranks} ranks of {threads} {plural} each (set by OMP_NUM_THREADS)\n")
    sys.stdout.flush()

    def command(link: int, screen: int | None) -> list[str]:
        return [*program, str(link), "-" if screen is None else str(screen), *arguments]

    for _ in range(_ATTEMPTS):
        port = free_port()
        started: list[RankProcess] = []
        try:
            for rank in range(ranks):
                environment = rank_environment(base, rank, ranks, port, threads)
                started.append(RankProcess(rank, command, environment))
            supervisor = Supervisor(started, grace=grace, timeout=timeout)
            outcome = launch_outcome(supervisor.run(), supervisor.signals)
        finally:
            for process in started:
                process.kill()
        if not outcome.port_taken:
            break
    return outcome
