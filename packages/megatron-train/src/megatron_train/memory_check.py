"""Check of the memory that a run needs at least, before anything is built."""

import os
from pathlib import Path

import torch
from megatron_models import TrainingMemory

from megatron_train.config.kernel_backends import chosen_backends
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.plan.memory import rank_memory

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")
_GIB = 1 << 30


def check_memory(config: RunConfig, device: torch.device) -> None:
    """Refuses a run that needs at least more than the total memory of its device.

    Raises:
        TrainError: The memory is too small; the message has both numbers and the remedy.
    """
    limit = device_memory(device)
    if limit is None:
        return
    needed, scores = minimum_memory(config), minimum_score_memory(config)
    if needed.total + scores <= limit:
        return
    states = needed.total - needed.activations
    where = "this host has" if device.type == "cpu" else "the device has"
    whole, instead = "", ""
    if scores:
        whole = f", {_size(scores)} of the attention scores of one layer"
        instead = "leave out --attention-backend unfused, which needs all scores at once, "
    raise TrainError(
        f"--seq-length {config.data.seq_length} with --micro-batch-size "
        f"{config.training.micro_batch_size} needs at least {_size(needed.total + scores)} on this "
        f"rank ({_size(needed.activations)} of activations, {_size(states)} of weights, gradients "
        f"and optimizer{whole}), but {where} {_size(limit)}; {instead}lower these flags or the "
        "size of the model, recompute activations (--recompute-granularity full), or shard the "
        "model over more ranks"
    )


def minimum_memory(config: RunConfig) -> TrainingMemory:
    """Returns the minimum memory in bytes of a rank of the first stage.

    Counts the activations of one micro-batch, although a pipeline has several in flight. With
    --compile, where the compiler decides what to save, and in a pool of ranks, counts those of a
    single token. For models of several trunks, which have no formula, counts none.
    """
    unknown = config.training.compile or config.layout.hybrid_cp
    whole = config.layout.pp * config.layout.vpp == 1
    return rank_memory(
        config,
        seq_length=1 if unknown else config.data.seq_length,
        sequence_parallel=config.placement.sequence_parallel and not unknown,
        layers=None if whole else len(config.layer_split[0]),
        activations=len(config.model.trunks()) == 1,
    )


def minimum_score_memory(config: RunConfig) -> int:
    """Returns the bytes of one layer's attention scores if all are needed at once, else 0.

    Unfused attention (``--attention-backend unfused``) needs fp32 scores ``[b, n, s, s]`` of this
    rank's heads, also where it computes them again. With context parallelism, counts the scores of
    one of the slices of a sequence.
    """
    training, layout = config.training, config.layout
    unfused = chosen_backends(config).get("attention") == "reference"
    if not unfused or training.compile or layout.hybrid_cp:
        return 0
    heads = config.model.attention_heads // layout.tp
    part = config.data.seq_length // (1 if layout.cp == 1 else 2 * layout.cp)
    return 4 * training.micro_batch_size * heads * part * part


def device_memory(device: torch.device) -> int | None:
    """Returns the memory in bytes for one rank; None if it is unknown.

    It is all memory of a GPU, or this rank's share of the memory and swap of this host.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = _host_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return None if total is None else total // ranks


def _host_memory() -> int | None:
    """Returns the memory and swap of this host in bytes, or the limit of the control group."""
    try:
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        sizes = {words[0]: int(words[1]) << 10 for words in lines if len(words) > 1}
        total = sizes["MemTotal:"] + sizes.get("SwapTotal:", 0)
    except (OSError, ValueError, KeyError):
        return None
    try:
        return min(total, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return total


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
