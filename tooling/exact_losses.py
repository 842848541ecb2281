"""Compares losses of short runs in several layouts, bit by bit, between two versions of the code.

A change that only moves code changes no bit of a loss, if the machine, torch and the number of
threads are the same. Run it in an environment of each version:

    python tooling/exact_losses.py --write before.json
    python tooling/exact_losses.py --compare before.json

The models are small, with the shapes of GPT-2, Llama and Mixtral; the data are `--mock-data`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 20
COMMON = (
    "pretrain gpt --mock-data --tokenizer-type NullTokenizer --vocab-size 211 --split 99,1,0 "
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine "
    f"--train-iters {STEPS} --log-interval 10 --eval-interval 10 --eval-iters 1 --device cpu"
)
LLAMA = (
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm "
    "--activation swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
)
EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
MIXTRAL = f"{LLAMA} {EXPERTS}"
CASES = {
    "gpt2, one rank, fp32": "",
    "llama, one rank, fp32": LLAMA,
    "mixtral, one rank, fp32": MIXTRAL,
    "llama, one rank, bf16": f"{LLAMA} --bf16",
    "gpt2, tp2 sp dp2, distributed optimizer": (
        "--nproc-per-node 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer"
    ),
    "llama, pp2 vpp2": (
        f"{LLAMA} --nproc-per-node 2 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2"
    ),
    "llama, cp2": (
        f"{LLAMA} --nproc-per-node 2 --context-parallel-size 2 --attention-dropout 0 "
        "--cp-comm-type p2p"
    ),
    "mixtral, ep2 tp2 all-to-all": (
        f"{MIXTRAL} --nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--moe-token-dispatcher-type alltoall"
    ),
    "gpt2, fully_shard dp2": "--nproc-per-node 2 --use-torch-fsdp2",
}


def losses(arguments: str, folder: Path) -> dict[str, list[str]]:
    """Runs one case; returns the losses and gradient norms of its steps in hexadecimal."""
    program = str(Path(sys.executable).with_name("megatron-train"))
    line = [program, *shlex.split(f"{COMMON} {arguments} --save"), str(folder / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"exact_losses: error: {shlex.join(line)}\n{done.stdout[-2000:]}{done.stderr}")
    rows = [json.loads(row) for row in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    names = sorted({name for row in steps for name in row if "loss" in name} | {"grad_norm"})
    return {name: [float(row[name]).hex() for row in steps if name in row] for name in names}


def main() -> None:
    """Runs all cases, and writes them or compares them with those of another version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the losses here")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="losses of another state")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that have this in a name")
    options = parser.parse_args()
    found, before = {}, json.loads(options.compare.read_text()) if options.compare else None
    moved = []
    for name, arguments in CASES.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = losses(arguments, Path(folder))
        last = float.fromhex(found[name]["lm loss"][-1])
        verdict = ""
        if before is not None:
            same = found[name] == before[name]
            verdict = "every bit equal" if same else "MOVED"
            moved += [] if same else [name]
        print(f"{name:<42} {len(found[name]['lm loss']):3} steps, last {last:.6f}  {verdict}")
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    if moved:
        sys.exit(f"exact_losses: error: the numbers of {', '.join(moved)} moved")


if __name__ == "__main__":
    main()
