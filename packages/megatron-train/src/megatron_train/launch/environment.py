"""Environment variables of a rank: those that torchrun sets, and the number of threads."""

import os
import socket
import sys
from collections.abc import Mapping

ADDRESS = "127.0.0.1"


def rank_environment(
    base: Mapping[str, str], rank: int, world_size: int, port: int, threads: int
) -> dict[str, str]:
    """Returns ``base`` with the variables that torchrun sets for a rank on a single machine.

    OMP_NUM_THREADS defaults to ``threads``. The interface of Gloo and NCCL defaults to the loopback
    device. Values in ``base`` take precedence over these defaults.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        # With this variable torch would expect an agent of torchrun to serve the store.
        **{name: value for name, value in base.items() if name != "TORCHELASTIC_USE_AGENT_STORE"},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
    }


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port() -> int:
    """Returns a port that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
    return port
