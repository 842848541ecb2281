"""The device of a rank, and the backend of process groups for such devices."""

import os
import socket
from typing import Final

import torch

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.launcher import environment_number

_MOST_RANKS: Final = 2**31 - 1


def backend_of(device_type: str) -> str:
    """Returns the backend of process groups for a device type: NCCL for CUDA, else Gloo.

    A job on GPUs has no Gloo groups in addition: each would connect all its ranks with one another
    and run a thread that wakes up a hundred times a second. A CPU tensor in a collective is
    therefore an error on GPUs. The worker pool uses the same backend, so tests show this error too.
    """
    return "nccl" if device_type == "cuda" else "gloo"


def local_device(device: str | torch.device) -> torch.device:
    """Returns the device of this rank and makes it the current one.

    For `cuda` on a machine with several GPUs, it is the GPU with index LOCAL_RANK.

    Raises:
        LayoutError: The GPU does not exist.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return where
    given = "LOCAL_RANK" in os.environ
    local_rank = environment_number("LOCAL_RANK", 0, _MOST_RANKS) if given else 0
    where = cuda_device(where, local_rank, torch.cuda.device_count())
    torch.cuda.set_device(where)
    return where


def cuda_device(device: torch.device, local_rank: int, visible: int) -> torch.device:
    """Returns the CUDA device of a rank.

    A rank that sees one device uses it for any `local_rank`: launchers such as Slurm with
    `--gpus-per-task=1` show each task its own device as device 0. `Job` verifies that no two ranks
    have the same device.

    Args:
        device: `cuda`, or a certain device such as `cuda:2`.
        local_rank: Index of the rank on its machine.
        visible: Number of devices that this process sees.

    Raises:
        LayoutError: The device does not exist.
    """
    if visible == 0:
        raise LayoutError(
            f"device {str(device)!r} is not available, torch sees no CUDA device: use device "
            "'cpu', or check CUDA_VISIBLE_DEVICES, the driver and that torch was built for CUDA"
        )
    if ":" in str(device):
        if device.index >= visible:
            raise LayoutError(
                f"device {str(device)!r} does not exist, {_devices(visible)} visible: use an index "
                f"below {visible}, or 'cuda' for the device of the rank"
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
    """Returns a text that identifies a GPU in the job; None for a CPU, which ranks may share."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid} of {socket.gethostname()}"


def _devices(count: int) -> str:
    return "1 CUDA device is" if count == 1 else f"{count} CUDA devices are"
