"""The main job on real text: `nox -s quickstart`.

Trains on Moby-Dick and validates on State of the Union addresses, both in corpus/. Every step is a
command that a person could type, and is printed before it runs. The results are in runs/quickstart.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from beside_ngrams import compare
from megatron_data import IndexedDataset

ROOT = Path(__file__).parents[1]
RUN = Path("runs/quickstart")
SEQUENCE = 128
BATCH = 4
VOCABULARY = 2048
TENSOR_PARALLEL = f"""--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel
        --micro-batch-size {BATCH}"""
DATA_PARALLEL = f"--nproc-per-node 2 --micro-batch-size {BATCH // 2}"
"""Layouts of two ranks: each rank has half of every matrix, or half of every batch."""

WHOLE = 1400
"""Number of steps after which the model is better than a bigram model."""

LEAST = 28
"""Smallest number of steps that leaves a step before and after every stop."""

WARMUP = 150
"""Warm-up steps. With 30, losses end between 4.82 and 5.07 by seed; with 150, near 4.76."""

SOON_LIMIT = 1e-4
"""Largest difference of losses in the first steps after a change of layout (fp32)."""


def bold(text: str) -> str:
    """Returns text in bold on a terminal."""
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


class Steps:
    """Numbered steps with their times."""

    def __init__(self, total: int) -> None:
        self.total, self.number, self.started = total, 0, time.monotonic()

    def begin(self, title: str) -> None:
        """Prints the title of the next step."""
        self.number += 1
        passed = time.monotonic() - self.started
        print(f"\n{bold(f'{self.number}/{self.total} {title}')}  ({passed:.0f} s)", flush=True)


def run(line: str) -> None:
    """Prints and runs a command; exits with its status if it fails."""
    command = shlex.split(line)
    print(f"$ {' '.join(line.split())}", flush=True)
    script = Path(sys.executable).with_name(command[0])
    status = subprocess.run([str(script), *command[1:]], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(f"quickstart: error: {command[0]} exited with {status}; see its message above")


def pretrain(iterations: int, save: Path, layout: str, more: str = "") -> None:
    """Runs one `megatron-train pretrain gpt` of the quickstart's model."""
    run(f"""megatron-train pretrain gpt {layout}
        --train-data-path {RUN}/moby_dick_text_document
        --valid-data-path {RUN}/state_of_the_union_text_document
        --tokenizer-model {RUN}/tokenizer
        --num-layers 4 --hidden-size 128 --num-attention-heads 4
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
        --global-batch-size {BATCH} --hidden-dropout 0 --attention-dropout 0
        --train-iters {iterations} --lr 3e-3 --min-lr 3e-4
        --lr-warmup-iters {min(WARMUP, iterations // 4)} --lr-decay-style linear
        --weight-decay 0.1 --adam-beta2 0.95
        --log-interval {max(iterations // 20, 1)}
        --eval-interval {max(iterations // 4, 1)} --eval-iters {eval_batches()}
        --save {save} {more}""")


def eval_batches() -> int:
    """Returns the number of batches that cover the validation text once."""
    with IndexedDataset(RUN / "state_of_the_union_text_document") as tokens:
        return (int(tokens.sequence_lengths.sum()) - 1) // SEQUENCE // BATCH


def steps_of(run_folder: Path) -> dict[int, dict[str, object]]:
    """Returns the training records of a run by iteration."""
    lines = (ROOT / run_folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {row["iteration"]: row for row in records if row["kind"] == "train"}


def main() -> None:
    """Runs all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--iterations", type=int, default=WHOLE, help=f"training steps ({WHOLE}, {LEAST} at least)"
    )
    iterations = parser.parse_args().iterations
    if iterations < LEAST:
        sys.exit(f"quickstart: error: --iterations {iterations} is too small to stop and continue; "
                 f"use at least {LEAST}")  # fmt: skip
    os.chdir(ROOT)
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    steps = Steps(7)

    steps.begin("Train a byte-level BPE on the training text")
    run(f"""megatron-data train-tokenizer --input corpus/moby_dick.jsonl
        --vocab-size {VOCABULARY} --output {RUN}/tokenizer""")

    steps.begin("Text to tokens: .bin/.idx files")
    for name, corpus in (
        ("moby_dick", "moby_dick.jsonl"),
        ("state_of_the_union", "state_of_the_union_small.jsonl"),
    ):
        run(f"""megatron-data preprocess --input corpus/{corpus} --append-eod
            --tokenizer-model {RUN}/tokenizer --output-prefix {RUN}/{name}""")
    run(f"megatron-data inspect {RUN}/moby_dick_text_document --tokenizer-model {RUN}/tokenizer")

    stop = iterations // 4
    beyond = stop + iterations // LEAST
    steps.begin("Pretrain on two ranks, tensor and sequence parallel, and stop ...")
    pretrain(iterations, RUN / "moved", TENSOR_PARALLEL, f"--exit-interval {stop}")

    steps.begin("... and continue in another layout, data parallel")
    pretrain(iterations, RUN / "moved", DATA_PARALLEL, f"--load {RUN}/moved")

    steps.begin("The same run without a change of layout, to a few steps after the stop")
    pretrain(iterations, RUN / "stayed", TENSOR_PARALLEL, f"--exit-interval {beyond}")

    steps.begin("The result")
    report(stop, beyond, short=iterations < WHOLE)

    steps.begin("A sample")
    run(f"megatron-train report {RUN}/moved")
    run(f"""megatron-infer generate --load {RUN}/moved --prompt "The whale"
        --max-new-tokens 100 --temperature 0.8 --top-k 40 --seed 1""")
    print("Such a short training gives words, not sentences. For sentences, train for ten minutes: "
          "nox -s first_model")  # fmt: skip
    print(f"\n{bold('Next')}: look at {RUN}/moved/report.html, then try")
    print(f"  megatron-infer generate --load {RUN}/moved --prompt 'My fellow citizens'")
    print(f"  megatron-ckpt inspect {RUN}/moved")
    print(f"  megatron-ckpt convert --to-hf {RUN}/moved {RUN}/huggingface")
    print(f"The commands are installed in {Path(sys.executable).parent}")


def report(stop: int, beyond: int, short: bool) -> None:
    """Compares the runs before and after the change of layout, and with n-gram models.

    It is an error if the model is not better than a bigram model, unless the run was ``short``.
    """
    moved, stayed = steps_of(RUN / "moved"), steps_of(RUN / "stayed")
    apart = [abs(moved[step]["lm loss"] - stayed[step]["lm loss"]) for step in sorted(stayed)]
    if any(apart[:stop]):
        sys.exit(f"quickstart: error: two equal runs differ before step {stop}")
    print(f"same layout: {stop} losses of two runs, all equal bit for bit")
    soon = max(apart[stop:])
    print(f"other layout from step {stop} on: in {beyond - stop} steps losses differ by at most "
          f"{soon:.1e} (fp32 rounding)")  # fmt: skip
    if not soon <= SOON_LIMIT:
        sys.exit("quickstart: error: the run continues differently in the other layout")
    model, ngrams = compare(RUN / "moved")
    if not model < ngrams[2]:
        if not short:
            sys.exit("quickstart: error: the model is no better than a bigram model")
        print(f"the model is not better than a bigram model yet; that takes about {WHOLE} steps")


if __name__ == "__main__":
    main()
