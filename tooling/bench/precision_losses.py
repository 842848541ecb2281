"""Losses of runs that differ only in their number formats, after equal numbers of steps.

    OMP_NUM_THREADS=1 python tooling/bench/precision_losses.py [--steps 200] [--width 96]
    OMP_NUM_THREADS=1 python tooling/bench/precision_losses.py --products [--seeds 3]

Trains the quickstart's model, smaller, on its corpus (Moby-Dick; validation on State of the Union
addresses) with equal seeds, batches and settings. Prints, for each format, the bytes of a parameter
with its gradient and optimizer state on one rank, the mean loss of the last 20 steps, the
validation loss after the last step, and both differences to fp32. fp16 begins with a loss scale
of 65,536, so that no step is skipped.

With `--products`, the runs are in bf16 and differ in the formats of the products of linear layers
(`--fp8-format`, `--fp4-format`). Losses are means over the seeds of weights and data order.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from megatron_train import read_records

ROOT = Path(__file__).parents[2]
VOCABULARY = 1024
AWARE = "--use-precision-aware-optimizer"
LAST = 20


class Kind(NamedTuple):
    """Number formats of a run: a name, its flags, and bytes of a parameter on one rank."""

    name: str
    flags: str
    bytes: str


KINDS = (
    Kind("fp32", "", "16"),
    Kind("fp32, other seed of the data order", "--seed 7", "16"),
    Kind("bf16", "--bf16", "18"),
    Kind("fp16", "--fp16 --initial-loss-scale 65536", "18"),
    Kind(
        "fp16, gradients in fp16",
        "--fp16 --initial-loss-scale 65536 --no-accumulate-allreduce-grads-in-fp32",
        "16",
    ),
    Kind("bf16, gradients in bf16", "--bf16 --main-grads-dtype bf16", "16"),
    Kind("bf16, main weights in 16 bits", f"--bf16 {AWARE}", "16"),
    Kind(
        "... and both means in bf16",
        f"--bf16 {AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "12",
    ),
    Kind(
        "... both means in fp16",
        f"--bf16 {AWARE} --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16",
        "12",
    ),
    Kind(
        "... means in fp8 and fp16",
        f"--bf16 {AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
        "11",
    ),
    Kind(
        "bf16 without main weights, stochastic rounding",
        f"--bf16 {AWARE} --main-params-dtype bf16",
        "14",
    ),
)


PRODUCTS = (
    Kind("bf16", "--bf16", "16"),
    Kind("fp8 hybrid, delayed", "--bf16 --fp8-format hybrid", "8"),
    Kind(
        "... maximum of 16 steps",
        "--bf16 --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
        "8",
    ),
    Kind("fp8 hybrid, tensorwise", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "8"),
    Kind(
        "... gradients of weights in bf16",
        "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --no-fp8-wgrad",
        "8",
    ),
    Kind("fp8 e4m3, delayed", "--bf16 --fp8-format e4m3", "8"),
    Kind("fp8 e4m3, tensorwise", "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise", "8"),
    Kind("fp8 e4m3, blockwise", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "8.25"),
    Kind("mxfp8 e4m3", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "8.25"),
    Kind("nvfp4", "--bf16 --fp4-format e2m1", "4.5"),
    Kind(
        "... rounded to the nearest", "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4-nearest", "4.5"
    ),
)
"""Products of linear layers; bytes are bits of an element of an operand, with its scales."""


def run(folder: Path, line: str) -> None:
    """Runs a command of this repository."""
    name, *words = shlex.split(line)
    program = Path(sys.executable).with_name(name)
    call = [program, *words]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"precision_losses: error: {line}\n{done.stdout}{done.stderr}")


def prepare(folder: Path) -> None:
    """Writes the tokenizer and the token files."""
    corpus = ROOT / "corpus"
    run(folder, f"megatron-data train-tokenizer --input {corpus}/moby_dick.jsonl --vocab-size "
        f"{VOCABULARY} --output tokenizer")  # fmt: skip
    for name, source in (("train", "moby_dick"), ("valid", "state_of_the_union_small")):
        run(folder, f"megatron-data preprocess --input {corpus}/{source}.jsonl --append-eod "
            f"--tokenizer-model tokenizer --output-prefix {name}")  # fmt: skip


def losses(folder: Path, name: str, flags: str) -> tuple[float, float, int]:
    """Trains; returns both losses, and the number of skipped steps."""
    run(folder, f"megatron-train pretrain gpt {flags} --save {name} --device cpu --no-progress")
    records = read_records(folder / name / "metrics.jsonl")
    last = [record["lm loss"] for record in records.train[-LAST:]]
    skipped = sum(not record["updated"] for record in records.train)
    return sum(last) / len(last), records.validation[-1]["lm loss"], skipped


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    shared = (
        "--train-data-path train_text_document --valid-data-path valid_text_document "
        f"--tokenizer-model tokenizer --num-layers {arguments.layers} --hidden-size "
        f"{arguments.width} --num-attention-heads 4 --position-embedding-type rope "
        "--normalization RMSNorm --swiglu --disable-bias-linear --seq-length 128 "
        "--micro-batch-size 4 --global-batch-size 4 --hidden-dropout 0 --attention-dropout 0 "
        f"--train-iters {arguments.steps} --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters "
        f"{arguments.steps // 4} --lr-decay-style linear --weight-decay 0.1 --adam-beta2 0.95 "
        f"--log-interval {arguments.steps} --eval-interval {arguments.steps} --eval-iters 20"
    )
    print(f"{arguments.steps} steps of 4 x 128 tokens, {arguments.layers} layers of width "
          f"{arguments.width}, vocabulary {VOCABULARY}\n")  # fmt: skip
    kinds, unit = (PRODUCTS, "bits") if arguments.products else (KINDS, "bytes")
    print(f"| formats | {unit} | training loss | difference | validation loss | difference |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        first: tuple[float, float] | None = None
        for number, kind in enumerate(kinds):
            found = [
                losses(folder, f"run{number}-{seed}", f"{shared} --seed {1234 + seed} {kind.flags}")
                for seed in range(arguments.seeds)
            ]
            train, valid, skipped = (
                sum(column) / len(found) for column in zip(*found, strict=True)
            )
            base = first = first or (train, valid)
            shares = [
                f"{100 * (new / old - 1):+.3f} %"
                for new, old in zip((train, valid), base, strict=True)
            ]
            note = f" ({skipped:g} steps skipped)" if skipped else ""
            print(f"| {kind.name}{note} | {kind.bytes} | {train:.4f} | {shares[0]} | {valid:.4f} | "
                  f"{shares[1]} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
