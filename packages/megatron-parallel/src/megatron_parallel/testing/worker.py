"""One rank: a process that joins a process group and then runs functions."""

import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import torch.distributed as dist

from megatron_parallel.mesh.devices import cuda_device
from megatron_parallel.testing import wire

if TYPE_CHECKING:
    from megatron_parallel.mesh.layout import ParallelLayout
    from megatron_parallel.mesh.mesh import Mesh


MAX_MESHES: Final = 3
"""Maximum number of meshes of a worker.

Each idle Gloo group wakes a thread 100 times a second (torch 2.13): 1,000 groups take most of a
core. Tests that use a few layouts in turn take 15 % longer with two.
"""


@dataclass
class Rank:
    """The rank on which the pool runs a function.

    Attributes:
        rank: Index of the rank.
        size: Number of ranks.
        device: Device of the rank.
        collective_timeout: Time-out of collectives of meshes in this call.
    """

    rank: int
    size: int
    device: torch.device
    collective_timeout: timedelta
    _meshes: "dict[tuple[ParallelLayout, timedelta], Mesh]" = field(
        default_factory=dict, repr=False
    )

    def mesh(self, layout: "ParallelLayout") -> "Mesh":
        """Returns the mesh of ``layout`` over all ranks of this call.

        The mesh is bound at the first call. The last few meshes are reused by later calls. All
        ranks must request the same layouts in the same order.
        """
        from megatron_parallel.mesh.mesh import Mesh

        layout = layout.resolve(self.size)
        key = layout, self.collective_timeout
        mesh = self._meshes.pop(key, None)
        if mesh is None:
            while len(self._meshes) >= MAX_MESHES:
                self._meshes.pop(next(iter(self._meshes))).close()
            mesh = Mesh.bind(layout, device=self.device, timeout=self.collective_timeout)
        self._meshes[key] = mesh  # the newest is last
        return mesh


@dataclass(frozen=True)
class Setup:
    """First message to a worker: how to join its group."""

    rank: int
    size: int
    backend: str
    device: str
    rendezvous: str
    trace: str
    collective_timeout: float


@dataclass(frozen=True)
class Call:
    """One call. Function and arguments are pickled separately, to be unpickled with ``path``."""

    path: list[str]
    folder: str
    collective_timeout: float
    payload: bytes


@dataclass(frozen=True)
class Outcome:
    """Answer of a rank: its pickled result, or its error."""

    result: bytes | None
    summary: str = ""
    traceback: str = ""


def serve(connection: socket.socket) -> None:
    """Joins the group of the first message, then serves calls until the connection closes."""
    setup: Setup = pickle.loads(wire.receive(connection))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(setup.trace).open("w") as trace:
        faulthandler.enable(trace, all_threads=True)
        faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
        try:
            rank = _join(setup)
        except Exception as error:  # noqa: BLE001 - sent to the pool, which raises it
            wire.send(connection, wire.dumps(_outcome_of(error, "could not join its group: ")))
            return
        wire.send(connection, wire.dumps(Outcome(None)))
        while True:
            try:
                call = pickle.loads(wire.receive(connection))
            except EOFError:
                return
            wire.send(connection, wire.dumps(_answer(call, rank)))


def _join(setup: Setup) -> Rank:
    torch.set_num_threads(1)
    device = torch.device(setup.device)
    if device.type == "cuda":
        device = cuda_device(device, setup.rank, torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=setup.collective_timeout)
    dist.init_process_group(
        setup.backend,
        init_method=f"file://{setup.rendezvous}",
        rank=setup.rank,
        world_size=setup.size,
        timeout=timeout,
    )
    return Rank(setup.rank, setup.size, device, timeout)


def _answer(call: Call, rank: Rank) -> Outcome:
    sys.path[:] = call.path
    os.chdir(call.folder)
    rank.collective_timeout = timedelta(seconds=call.collective_timeout)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    try:
        function, arguments = pickle.loads(call.payload)
        result = wire.dumps(function(rank, *arguments))
    except BaseException as error:  # noqa: BLE001 - SystemExit is sent to the pool too
        return _outcome_of(error)
    try:
        if rank.size > 1:
            dist.barrier()  # NCCL uses the current device, set by `_join`
    except Exception as error:  # noqa: BLE001 - sent to the pool
        return _outcome_of(error, "returned, but the barrier behind it failed: ")
    return Outcome(result)


def _outcome_of(error: BaseException, prefix: str = "raised ") -> Outcome:
    last = traceback.format_exception_only(error)[-1].strip()
    # Without the frame of the worker. As text, since an exception may not be picklable.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Outcome(None, prefix + last.partition("\n")[0], text)
