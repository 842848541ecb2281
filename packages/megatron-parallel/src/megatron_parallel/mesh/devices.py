"""Which device a rank computes on, and which backend joins ranks on such devices."""

import os
import socket
from typing import Final

import torch

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.launcher import environment_number

_MOST_RANKS: Final = 2**31 - 1


def backend_of(device_type: str) -> str:
    """Returns the backend of process groups of ranks on such devices: NCCL for cuda, else Gloo.

    A job on GPUs has no Gloo groups beside those of NCCL: each would connect all its ranks with one
    another and keep a thread that wakes up a hundred times a second. So a tensor on the CPU in a
    collective is an error there, and the worker pool, which takes its backend from here, shows it
    in tests too.
    """
    return "nccl" if device_type == "cuda" else "gloo"


def local_device(device: str | torch.device) -> torch.device:
    """Returns the device itself, or of several GPUs the one of this rank, and makes it current.

    Raises:
        LayoutError: There is no such GPU.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return where
    given = "LOCAL_RANK" in os.environ
    local_rank = environment_number("LOCAL_RANK", 0, _MOST_RANKS) if given else 0
    where = own_device(where, local_rank, torch.cuda.device_count())
    torch.cuda.set_device(where)
    return where


def own_device(device: torch.device, local_rank: int, visible: int) -> torch.device:
    """Returns the CUDA device of a rank.

    A rank that sees one device takes it, whatever its `local_rank`: launchers such as Slurm with
    `--gpus-per-task=1` show each task its own device as device 0. Whether two ranks were given the
    same one is compared in `Job`.

    Args:
        device: `cuda`, or `cuda:2` for that one.
        local_rank: Number of the rank on its machine.
        visible: Number of devices that this process sees.

    Raises:
        LayoutError: There is no such device.
    """
    if visible == 0:
        raise LayoutError(
            f"device {str(device)!r} was asked for, but torch sees no CUDA device: use device "
            "'cpu', or check CUDA_VISIBLE_DEVICES, the driver and that torch was built for CUDA"
        )
    if ":" in str(device):
        if device.index >= visible:
            raise LayoutError(
                f"device {str(device)!r} was asked for, but {_devices(visible)} visible: give "
                f"an index below {visible}, or 'cuda' for the device of the rank"
            )
        return device
    if visible == 1:
        return torch.device("cuda", 0)
    if local_rank >= visible:
        raise LayoutError(
            f"LOCAL_RANK is {local_rank}, but {_devices(visible)} visible: start at most {visible} "
            "ranks on this machine, or show each task one device of its own (Slurm: "
            "--gpus-per-task=1)"
        )
    return torch.device("cuda", local_rank)


def device_identity(device: torch.device) -> str | None:
    """Return what tells a GPU from all others of the job; None for a CPU, which ranks may share."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid} of {socket.gethostname()}"


def _devices(count: int) -> str:
    return "1 CUDA device is" if count == 1 else f"{count} CUDA devices are"
