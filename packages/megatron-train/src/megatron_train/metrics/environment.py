"""The environment of a run: versions, device and commit."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from megatron_train.launch.environment import CONNECTIONS

_PACKAGES = ("parallel", "kernels", "models", "data", "optim", "ckpt", "train")


def environment(device: torch.device) -> dict[str, str]:
    """Returns versions, device, threads and, in a git work tree, the commit."""
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts["numpy"] = importlib.metadata.version("numpy")
    for name in _PACKAGES:
        facts[f"megatron-{name}"] = importlib.metadata.version(f"megatron-{name}")
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts[CONNECTIONS] = os.environ.get(CONNECTIONS, "unset")
    else:
        facts["device"] = (
            f"{platform.machine()} CPU, {torch.get_num_threads()} of {os.cpu_count()} threads"
        )
    facts["system"] = f"{platform.system()} {platform.release()}"
    commit = _commit()
    if commit:
        facts["commit"] = commit
    return facts


def _commit() -> str | None:
    """Returns the commit of this package's source, with ``+`` if the work tree has changes."""
    folder = Path(__file__).resolve().parent
    git = ("git", "-C", str(folder))
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", __file__],
            capture_output=True,
            timeout=5,
            check=False,
        )
        if tracked.returncode:
            return None
        head = subprocess.run(
            [*git, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() or None
