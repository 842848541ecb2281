"""The peak FLOP/s that model FLOPs utilisation (MFU) is measured against.

For known GPUs the peak is the dense figure of the data sheet, without sparsity. For other GPUs a
matrix product is timed, which gives the rate that the GPU reaches in practice. For a CPU there is
no peak: other processes share it, so a measured product may take twice or half as long an hour
later, and MFU would depend more on those processes than on the run.
"""

import re
import time
from dataclasses import dataclass

import torch

_TERA = 1e12
_THREAD = 1e11  # assumed FLOP/s of a CPU thread in fp32

# Dense TFLOP/s by device name: bf16 on tensor (matrix) cores, and fp32. Source: data sheets of
# NVIDIA and AMD; if a data sheet has only the figure with sparsity, half of that figure. More
# specific names come first. Data sheets of the latest GPUs: "NVIDIA H200 Tensor Core GPU" (1,671
# TFLOP/s with sparsity for H200 NVL), "NVIDIA GB300 NVL72" (360 PFLOP/s with sparsity for 72 GPUs)
# and "NVIDIA HGX Platform" (36 PFLOP/s with sparsity for 8 B300).
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
    """Peak FLOP/s of one device and the source of the figure."""

    flops_per_second: float
    source: str


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Returns the peak of ``device`` for matrix products in ``dtype``, or None if it is unknown.

    Uses the table for known GPUs, except for fp32 with TF32 enabled. Times a matrix product on
    other GPUs. Returns None for a CPU.
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
    """Returns an upper estimate of the FLOP/s of this process on a CPU, to estimate step times.

    The estimate is 100 GFLOP/s for each of torch's threads, and ten times that in bf16, since some
    CPUs have matrix units for bf16. Most CPUs reach less.
    """
    each = _THREAD * (10 if dtype in (torch.bfloat16, torch.float16) else 1)
    threads = torch.get_num_threads()
    return Peak(each * threads, f"{each / 1e9:g} GFLOP/s assumed for each CPU thread")


def data_sheet_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Returns the data-sheet peak in FLOP/s of a device by name, or None if it is not listed."""
    for name, bf16, fp32 in _KNOWN:
        if re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", device_name):
            figure = {torch.bfloat16: bf16, torch.float16: bf16, torch.float32: fp32}.get(dtype)
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
    names = {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float64: "fp64",
    }
    return names.get(dtype, str(dtype).removeprefix("torch."))
