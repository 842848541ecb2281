"""LayerNorm and lookups of rows in bfloat16 on a CPU, both passes: ours beside torch's own.

    OMP_NUM_THREADS=1 python tooling/bench/row_sums.py [--rounds 15]

torch adds up gradients over rows in bfloat16, ours in float32. Prints medians of interleaved
rounds in milliseconds, and the error of the gradient of the shift, or of the rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from megatron_kernels import layer_norm, select_rows
from torch import Tensor
from torch.nn import functional

NORMS = ((16_384, 64), (4096, 256), (4096, 768), (2048, 2048))
TABLES = ((1024, 64, 16_384), (32_000, 256, 4096), (50_304, 768, 1024))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {rounds}")
    print("| operation | ours | torch | torch in float32 | error of ours | of torch |")
    print("|---|---|---|---|---|---|")
    torch.manual_seed(0)
    for rows, width in NORMS:
        operands = torch.randn(rows, width) + 0.5, torch.ones(width), torch.zeros(width)
        forms = {
            "ours": layer_norm,
            "torch": lambda x, gain, shift: functional.layer_norm(x, gain.shape, gain, shift),
            "float32": lambda x, *rest: functional.layer_norm(
                x.float(), rest[0].shape, *(each.float() for each in rest)
            ).to(x.dtype),
        }
        report(f"LayerNorm of {rows:,} x {width}", forms, operands, rounds)
    for size, width, tokens in TABLES:
        chosen = torch.randn(tokens).abs().mul(size / 8).long().clamp(max=size - 1)
        forms = {
            "ours": lambda weight, chosen=chosen: select_rows(weight, chosen),
            "torch": lambda weight, chosen=chosen: functional.embedding(chosen, weight),
            "float32": lambda weight, chosen=chosen: functional.embedding(
                chosen, weight.float()
            ).to(weight.dtype),
        }
        report(f"{tokens:,} of {size:,} rows x {width}", forms, (torch.randn(size, width),), rounds)


def report(
    name: str, forms: dict[str, Callable[..., Tensor]], operands: tuple[Tensor, ...], rounds: int
) -> None:
    """Measures the forms in turn and prints a row."""
    exact = gradient(forms["torch"], operands, torch.float64)
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form, function in forms.items():
            start = time.perf_counter()
            gradient(function, operands, torch.bfloat16)
            seconds[form].append(time.perf_counter() - start)
    errors = [
        (gradient(forms[form], operands, torch.bfloat16).double() - exact).norm() / exact.norm()
        for form in ("ours", "torch")
    ]
    times = " | ".join(f"{1e3 * statistics.median(each):.2f}" for each in seconds.values())
    print(f"| {name} | {times} | {errors[0]:.4f} | {errors[1]:.4f} |")


def gradient(
    function: Callable[..., Tensor], operands: tuple[Tensor, ...], dtype: torch.dtype
) -> Tensor:
    """Returns the gradient of the last operand, after both passes."""
    leaves = [each.bfloat16().to(dtype).requires_grad_() for each in operands]
    y = function(*leaves)
    dy = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape).to(torch.bfloat16)
    return torch.autograd.grad(y, leaves, dy.to(dtype))[-1]


if __name__ == "__main__":
    main()
