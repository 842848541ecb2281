"""Writes the peaks of published jobs, beside the formula of `plan --count`, into docs/dry-run.md.

    PYTHONPATH=tooling python -m device.published [--only PATTERN]

Without ``--only`` it takes some minutes.
"""

from megatron_parallel.imagined import NoGuardError, load_guard

try:
    load_guard()
except NoGuardError as error:
    raise SystemExit(f"published: error: {error}") from None

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.dry_run.counts import RankUse
from megatron_train.dry_run.dry_run import dry_run
from megatron_train.plan.count import Count, count

PAGE: Final = Path(__file__).parents[2] / "docs" / "dry-run.md"
START, END = "<!-- published jobs -->\n", "<!-- end of published jobs -->\n"

_LLAMA: Final = (
    "--normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 8 --vocab-size 128255 --seq-length 8192 --max-position-embeddings 8192 "
)
_COMMON: Final = "--bf16 --lr 1e-4 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
_OVERLAPPED: Final = (
    _COMMON + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
)
_GPT3: Final = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 51199 --tensor-model-parallel-size 8 "
    "--sequence-parallel --recompute-granularity selective --bf16 --lr 1e-4 --micro-batch-size 1 "
)
_DEEPSEEK_V3: Final = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--vocab-size 129279 --seq-length 4096 --max-position-embeddings 4096 --normalization RMSNorm "
    "--position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-router-num-groups 8 "
    "--moe-router-group-topk 4 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --mtp-num-layers 1 "
    "--moe-token-dispatcher-type alltoall "
)


class Published(NamedTuple):
    """A job of a report or recipe.

    Attributes:
        name: Model.
        source: Where the layout was published.
        flags: Flags of ``megatron-train dry-run gpt``.
    """

    name: str
    source: str
    flags: str


JOBS: Final = (
    Published(
        "Llama 3 8B",
        "Megatron Bridge, recipe",
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 "
        + _LLAMA
        + _OVERLAPPED
        + "--context-parallel-size 2 --world-size 8 --global-batch-size 128",
    ),
    Published(
        "Llama 3 70B",
        "Megatron Bridge, recipe",
        "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
        + _LLAMA
        + _OVERLAPPED
        + "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--num-virtual-stages-per-pipeline-rank 5 --context-parallel-size 2 --world-size 64 "
        "--global-batch-size 128",
    ),
    Published(
        "GPT-3 175B",
        "Korthikanti et al. 2022, table 3",
        _GPT3
        + "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 3 "
        + "--world-size 64 --global-batch-size 64",
    ),
    Published(
        "GPT-3 175B",
        "Megatron-LM, example",
        _GPT3 + "--pipeline-model-parallel-size 16 --world-size 1024 --global-batch-size 1536",
    ),
    Published(
        "DeepSeek-V3",
        "Megatron Bridge, recipe",
        _DEEPSEEK_V3
        + _OVERLAPPED
        + "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
        "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 4 "
        "--decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 64 "
        "--recompute-granularity selective --recompute-modules mla_up_proj --world-size 1024 "
        "--global-batch-size 4096",
    ),
)


def main() -> int:
    """Measures the jobs, prints their rows, and writes them into the page."""
    parser = argparse.ArgumentParser(prog="device.published")
    parser.add_argument("--only", default="", help="jobs whose name matches; the page stays")
    options = parser.parse_args()
    lines = [
        "| job | formula: states | activations | sum | dry run: first stage | states | activations "
        "and temporaries | middle | last |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    for job in JOBS:
        if re.search(options.only, f"{job.name}, {job.source}"):
            lines.append(measure(job))
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    if not options.only:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(START)[0], page.split(END)[1]
        PAGE.write_text(before + START + "\n".join(lines) + "\n" + END + after, encoding="utf-8")
    return 0


def measure(job: Published) -> str:
    """Returns the row of a job."""
    run = resolve_run(build_parser().parse_args(["dry-run", "gpt", *job.flags.split()]))
    pp = run.layout.pp
    stages = tuple(dict.fromkeys((0, pp // 2, pp - 1)))
    uses = dry_run(run, "cuda", stages, processes=os.cpu_count() or 1, memory_only=True)
    layout = " x ".join(str(run.layout).partition(", order")[0].split(" x "))
    what = f"{job.name}: {layout} ({job.source})"
    return _row(what, count(run), uses)


def _row(what: str, formula: Count, uses: Sequence[RankUse]) -> str:
    memory, first = formula.memory, uses[0]
    if memory is None:
        raise ValueError(formula.memory_unknown)
    states = sum(n for (part, _), n in first.at_peak.items() if not part.startswith("activ"))
    numbers = [memory.total - memory.activations, memory.activations, memory.total]
    numbers += [first.peak, states, first.peak - states]
    cells = [f"{number / (1 << 30):.1f}" for number in numbers]
    cells += [f"{use.peak / (1 << 30):.1f}" for use in uses[1:]] or ["", ""]
    if len(uses) == 2:
        cells.insert(-1, "")
    return f"| {what} | {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
