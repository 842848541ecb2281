"""Rendezvous: creates the default process group from the environment variables of torchrun.

The key-value store of the job accepts requests from every process that can reach it, and the store
of torch listens on every interface. If MASTER_ADDR is a loopback address, all ranks are on one
machine, and rank 0 gives torch a socket that is bound to that address.
"""

import ipaddress
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_parallel import _compat
from megatron_parallel.collectives.watchdog import backend_timeout
from megatron_parallel.errors import CollectiveError, LayoutError, backend_text
from megatron_parallel.mesh.devices import backend_of
from megatron_parallel.mesh.launcher import environment_number

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_default_group(device: torch.device, timeout: timedelta) -> None:
    """Creates the default process group: NCCL for a CUDA ``device``, Gloo otherwise.

    The store listens only on the loopback interface if MASTER_ADDR is a loopback address and rank 0
    runs the store. A store that torchrun's agent runs listens on every interface.

    Raises:
        LayoutError: Environment variables are missing or not valid numbers.
        CollectiveError: Not all ranks join within ``timeout``, or the port is in use.
    """
    absent = [name for name in _NEEDED if name not in os.environ]
    if absent:
        raise LayoutError(
            f"no process group and no {', '.join(absent)} in the environment: "
            "start the ranks with torchrun"
        )
    size = environment_number("WORLD_SIZE", 1, 2**31 - 1)
    rank = environment_number("RANK", 0, size - 1)
    host, port = os.environ["MASTER_ADDR"], environment_number("MASTER_PORT", 0, 2**16 - 1)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = None if agent else loopback_address(host)
    backend = backend_of(device.type)
    longest = backend_timeout(device, timeout)
    try:
        if address is None:
            dist.init_process_group(backend, timeout=longest)
            return
        store = _loopback_store(address, port, rank, size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=longest)
    except CollectiveError:  # has a message of its own
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} could not join the job of {size} ranks at {host}:{port} within "
            f"{longest.total_seconds():g} s: a rank did not start, or the address is wrong "
            f"({backend_text(error)})"
        ) from error


def loopback_address(host: str) -> str | None:
    """Returns the loopback address that ``host`` names; None for every other host."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:  # a host name, which may resolve differently on other machines
        return None


def _loopback_store(
    address: str, port: int, rank: int, size: int, timeout: timedelta
) -> _compat.Store:
    """Returns the store, which rank 0 runs, once all ranks are connected to it."""
    if rank != 0:
        return _compat.tcp_store(address, port, size, timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, port), family=family, backlog=size + 128)
    except OSError as error:
        raise CollectiveError(
            f"rank {rank} cannot listen on {address}:{port} (MASTER_ADDR:MASTER_PORT) for the "
            f"others: {error.strerror}"
        ) from error
    with server:
        port = server.getsockname()[1]
        return _compat.tcp_store(address, port, size, timeout, server.detach())
