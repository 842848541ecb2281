"""Counts the activations that layers save, and compares them with formulas, on one to four ranks.

    python -m layouts.activations [--write docs/parallelism.md]

Hooks on the tensors that autograd saves count the bytes. The formula is that of Korthikanti et al.
2022 with the bytes that each operation saves here (`megatron_models.activations`).
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from megatron_kernels import Mask
from megatron_models import (
    GPT,
    Dropout,
    GPTConfig,
    LayerPass,
    Placement,
    SavedBytes,
    layer_activations,
    stack_activations,
)
from megatron_models.components.context import Context
from megatron_models.components.dropout import StageDropout
from megatron_models.components.stack import run_layers
from megatron_parallel import DropoutKey, Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.recompute import count_saved_activations
from megatron_parallel.testing import WorkerPool

from layouts.output import publish

LENGTH, SAMPLES = 256, 2
CONFIG = GPTConfig(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=8,
    vocab_size=1000,
    max_position_embeddings=LENGTH,
)
UNIT = CONFIG.num_layers * LENGTH * SAMPLES * CONFIG.hidden_size
MODULES = ("core_attn", "mlp", "layernorm")
UNIFORM = RecomputeConfig(granularity="full", method="uniform", num_layers=4)
PLANS = {
    "nothing": RecomputeConfig(),
    **{
        f"selective: {module}": RecomputeConfig(granularity="selective", modules=(module,))
        for module in MODULES
    },
    "selective: all three": RecomputeConfig(granularity="selective", modules=MODULES),
    "full, uniform, groups of 4": UNIFORM,
    "full, uniform, groups of 1": replace(UNIFORM, num_layers=1),
    "full, block, 5 of 8": RecomputeConfig(granularity="full", method="block", num_layers=5),
    "full, uniform, groups of 4, cut": replace(UNIFORM, distribute_saved_activations=True),
}
ON_RANKS = ("nothing", "selective: core_attn", "selective: all three", "full, uniform, groups of 4")


class Run(NamedTuple):
    """A forward pass of all layers whose saved bytes are counted."""

    plan: str
    dtype: torch.dtype
    dropout: bool = False
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def saved_bytes(self) -> SavedBytes:
        """Bytes that its operations save."""
        size, norm = self.dtype.itemsize, CONFIG.normalization
        return SavedBytes.cpu(size, norm, attention_dropout=self.dropout)

    def formula(self, saved_bytes: SavedBytes) -> int:
        """Returns the bytes by formula."""
        sharding = {"tp": self.tp, "sequence_parallel": self.sequence_parallel}
        plan = PLANS[self.plan]
        return stack_activations(
            CONFIG, LayerPass(LENGTH, SAMPLES, saved_bytes, recompute=plan, **sharding)
        )


def count(mesh: Mesh, run: Run) -> dict[str, int]:
    """Returns the bytes that all layers save of one micro-batch, by module.

    Tensors that the layers share are left out.
    """
    plan, cut = PLANS[run.plan], run.sequence_parallel
    model = GPT(CONFIG, Placement(mesh, dtype=run.dtype, recompute=plan, sequence_parallel=cut))
    dropout = None
    if run.dropout:
        numbers = torch.arange(SAMPLES)
        key = DropoutKey.for_batch(seed=1, iteration=1, samples=numbers, positions=LENGTH)
        dropout = StageDropout.from_dropout(Dropout(key, 0.1, 0.1), model.tp if cut else None)
    length = LENGTH // model.tp.size if cut else LENGTH
    x = torch.randn(length, SAMPLES, CONFIG.hidden_size, dtype=run.dtype, requires_grad=True) * 1.0
    context = Context(Mask(), dropout=dropout, recompute=plan)
    with count_saved_activations(model) as saved:
        run_layers(model.layers, x, context, model.tp)
    if dropout is not None and plan.method != "uniform":
        saved.by_module["key of dropout"] = -8 * LENGTH * SAMPLES
    return saved.by_module


def runs(dtype: torch.dtype) -> list[Run]:
    """Returns the rows of the table."""
    found = [Run(plan, dtype) for plan in PLANS if not plan.endswith("cut")]
    found += [Run(plan, dtype, dropout=True) for plan in ("nothing", "selective: core_attn")]
    for tp in (2, 4):
        for cut in (False, True):
            found += [Run(plan, dtype, False, tp, cut) for plan in ON_RANKS]
            found.append(Run("nothing", dtype, True, tp, cut))
        found.append(Run("full, uniform, groups of 4, cut", dtype, False, tp))
    return found


def table(pool: WorkerPool, failed: list[str]) -> str:
    """Returns the table of all layers, by layout and recomputation."""
    lines = [
        "| ranks | dropout | recomputed | fp32 counted | formula | bf16 counted | formula "
        "| of L·s·b·h | the paper's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pair in zip(runs(torch.float32), runs(torch.bfloat16), strict=True):
        cells = []
        for run in pair:
            layout, expected = ParallelLayout(tp=run.tp, dp=1), run.formula(run.saved_bytes)
            counted = {sum(by.values()) for by in pool.run_mesh(layout, count, run)}
            if counted != {expected}:
                failed.append(f"{run}: {counted} bytes are saved, by formula {expected}")
            cells += [f"{max(counted):,}", f"{expected:,}"]
        run = pair[1]
        ranks = f"tp{run.tp}" + "·sp" * run.sequence_parallel if run.tp > 1 else "one"
        paper = run.formula(SavedBytes.paper()) / UNIT
        words = [ranks, "on" if run.dropout else "off", run.plan, *cells]
        lines.append(f"| {' | '.join(words)} | {max(counted) / UNIT:.2f} | {paper:.2f} |")
    return "\n".join(lines) + "\n"


TOGETHER = {"attention.out": "attention", "mlp.down": "mlp"}
"""Fused operations save their output, which the product after them would save otherwise."""


def terms(failed: list[str]) -> str:
    """Returns the table of one layer in bf16 with dropout, module by module.

    Attention's output counts as saved by attention.
    """
    run = Run("nothing", torch.bfloat16, dropout=True)
    prefix = f"layers.{CONFIG.num_layers - 1}"
    counted = {
        name.removeprefix(prefix).lstrip(".") or "dropout": nbytes
        for name, nbytes in count(Mesh.single(), run).items()
        if name.startswith(prefix)
    }
    found, expected, paper = (
        added(each)
        for each in (
            counted,
            layer_activations(CONFIG, LayerPass(LENGTH, SAMPLES, run.saved_bytes)),
            layer_activations(CONFIG, LayerPass(LENGTH, SAMPLES, SavedBytes.paper())),
        )
    )
    unit = LENGTH * SAMPLES * CONFIG.hidden_size
    lines = ["| part | counted | formula | of s·b·h | the paper's |", "|---|---|---|---|---|"]
    for name, nbytes in expected.items():
        if found.get(name, 0) != nbytes:
            failed.append(f"{name}: {found.get(name, 0)} bytes are saved, by formula {nbytes}")
        words = [name, f"{found.get(name, 0):,}", f"{nbytes:,}"]
        lines.append(
            f"| {' | '.join(words)} | {nbytes / unit:.2f} | {paper.get(name, 0) / unit:.2f} |"
        )
    return "\n".join(lines) + "\n"


def added(parts: dict[str, int]) -> dict[str, int]:
    """Returns the sums over modules of which one saves the other's tensors."""
    sums: dict[str, int] = {}
    for name, nbytes in parts.items():
        sums[TOGETHER.get(name, name)] = sums.get(TOGETHER.get(name, name), 0) + nbytes
    return sums


def main() -> int:
    """Counts everything; returns 0 if all counts equal the formulas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    arguments = parser.parse_args()
    failed: list[str] = []
    with WorkerPool(max_ranks=4, collective_timeout=60, timeout=300) as pool:
        text = table(pool, failed) + "\n" + terms(failed)
    return publish("activations", text, failed, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
