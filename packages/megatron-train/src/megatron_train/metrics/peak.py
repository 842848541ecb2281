"""The arithmetic peak that model FLOPs utilisation (MFU) is measured against.

Known GPUs have the dense figures of their data sheets (no sparsity). Of other GPUs one matrix
product is measured, which is what they reach at best rather than what they could in theory. A CPU
has no peak: other processes share it, so a product measured at the start may take half as long or
twice as long as one an hour later, and MFU would say more of them than of the run.
"""

import re
import time
from dataclasses import dataclass

import torch

_TERA = 1e12
_THREAD = 1e11  # FLOP/s of a thread of a CPU, in fp32

# Dense TFLOP/s by device name, from NVIDIA's and AMD's data sheets: bf16 on tensor (matrix) cores,
# and fp32. Where a data sheet gives only the figure with sparsity, half of it. More specific names
# first. Of the latest: "NVIDIA H200 Tensor Core GPU" (1,671 TFLOP/s with sparsity for H200 NVL),
# "NVIDIA GB300 NVL72" (360 PFLOP/s with sparsity for 72 GPUs) and "NVIDIA HGX Platform" (36 PFLOP/s
# with sparsity for 8 B300).
_KNOWN: tuple[tuple[str, float, float], ...] = (
    ("GB300", 2500, 80),
    ("B300", 2250, 75),
    ("GB200", 2500, 80),
    ("B200", 2250, 75),
    ("GH200", 989, 67),
    ("H200 NVL", 835, 60),
    ("H200", 989, 67),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("H800", 989, 67),
    ("H20", 148, 44),
    ("A100", 312, 19.5),
    ("A800", 312, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165, 10.3),
    ("L40S", 362, 91.6),
    ("L40", 181, 90.5),
    ("L4", 121, 30.3),
    ("MI300X", 1307, 163.4),
)


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device, and where the figure comes from."""

    flops_per_second: float
    source: str


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Returns the peak of ``device`` for matrix products in ``dtype``, or None where none is known.

    The table is used for known GPUs unless TF32 changes what an fp32 product means; for other GPUs
    one matrix product is timed. None for a CPU.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    listed = None if tf32 else data_sheet_peak(name, dtype)
    if listed is not None:
        return Peak(listed, f"data sheet of {name}, dense {_short(dtype)}")
    return measured_peak(device, dtype)


def assumed_cpu_peak(dtype: torch.dtype) -> Peak:
    """Returns what this process is assumed to compute on a CPU at best, to estimate a step by.

    100 GFLOP/s for each of torch's threads, ten times as many in bf16, for which some CPUs have
    matrix units. Most CPUs reach less.
    """
    each = _THREAD * (10 if dtype == torch.bfloat16 else 1)
    threads = torch.get_num_threads()
    return Peak(each * threads, f"{each / 1e9:g} GFLOP/s assumed of each thread of a CPU")


def data_sheet_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Returns the data-sheet peak in FLOP/s of a device by name, or None if it is not listed."""
    for name, bf16, fp32 in _KNOWN:
        if re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", device_name):
            figure = {torch.bfloat16: bf16, torch.float32: fp32}.get(dtype)
            return None if figure is None else figure * _TERA
    return None


def measured_peak(device: torch.device, dtype: torch.dtype, size: int | None = None) -> Peak | None:
    """Returns the best of five timed square matrix products, or None if they cannot run."""
    size = size or 8192
    try:
        a = torch.ones(size, size, device=device, dtype=dtype)
        b = torch.ones(size, size, device=device, dtype=dtype)
        torch.mm(a, b)
        best = min(_time_product(a, b) for _ in range(5))
    except RuntimeError:
        return None
    return Peak(2.0 * size**3 / best, f"measured {size}x{size} {_short(dtype)} matrix product")


def _time_product(a: torch.Tensor, b: torch.Tensor) -> float:
    _wait(a.device)
    start = time.perf_counter()
    torch.mm(a, b)
    _wait(a.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )
