"""Start ranks, watch over them, and say what became of them."""

import os
import sys
from collections.abc import Sequence

from megatron_train.launch.environment import free_port, rank_environment, usable_cores
from megatron_train.launch.process import RankProcess
from megatron_train.launch.supervisor import GRACE, Supervisor
from megatron_train.launch.verdict import Verdict, judge

_ATTEMPTS = 5
"""A free port is asked for before a rank listens on it, so another process can take it."""


def launch(
    program: Sequence[str],
    words: Sequence[str],
    ranks: int,
    *,
    grace: float = GRACE,
    timeout: float | None = None,
) -> Verdict:
    """Run ``program LINK SCREEN words...`` as ``ranks`` ranks on this machine until all have ended.

    LINK is the descriptor of the rank's `Link`, SCREEN that of the parent's standard error, or
    ``-`` for all ranks but 0. `grace` and `timeout` are those of `Supervisor`, in seconds.
    """
    threads = max(1, usable_cores() // ranks)
    if "OMP_NUM_THREADS" not in os.environ:
        plural = "thread" if threads == 1 else "threads"
        sys.stdout.write(f"{ranks} ranks of {threads} {plural} each (set by OMP_NUM_THREADS)\n")
    sys.stdout.flush()

    def command(link: int, screen: int | None) -> list[str]:
        return [*program, str(link), "-" if screen is None else str(screen), *words]

    for _ in range(_ATTEMPTS):
        port = free_port()
        started: list[RankProcess] = []
        try:
            for rank in range(ranks):
                environment = rank_environment(os.environ, rank, ranks, port, threads)
                started.append(RankProcess(rank, command, environment))
            supervisor = Supervisor(started, grace=grace, timeout=timeout)
            verdict = judge(supervisor.run(), supervisor.signals)
        finally:
            for process in started:
                process.kill()
        if not verdict.port_taken:
            break
    return verdict
