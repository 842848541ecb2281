"""Environment variables of a rank: those that torchrun sets, number of threads, and CUDA's."""

import os
import socket
import sys
from collections.abc import Mapping
from typing import Final

from megatron_parallel import ParallelLayout

CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
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


def cuda_defaults(layout: ParallelLayout, *, fully_sharded: bool) -> dict[str, str]:
    """Returns defaults of CUDA's variables for the ranks of a layout.

    With tensor or context parallelism, kernels of all streams share one connection, as Megatron-LM
    requires on GPUs before Blackwell: the GPU then starts them in the order in which they were
    launched. A collective thus starts before the matrix product that it overlaps with, which would
    otherwise occupy all multiprocessors first. With fully sharded parameters the default of the
    driver remains, so that gathering does not wait for computation that was launched earlier.
    """
    overlaps = layout.tp > 1 or layout.cp > 1 or layout.hybrid_cp
    return {CONNECTIONS: "1"} if overlaps and not fully_sharded else {}


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
