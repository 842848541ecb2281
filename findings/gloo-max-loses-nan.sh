#!/usr/bin/env bash
# Package:   torch 2.13.0, Gloo on a CPU; seen on 2026-11-27.
# Guess:     the maximum over ranks is NaN if any rank has NaN, as torch.maximum and torch.amax give.
# Behaviour: all_reduce with ReduceOp.MAX or MIN keeps the number of the first rank and drops a NaN of
#            another rank, while SUM keeps it. Which rank holds the NaN decides the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$folder/ranks.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 3


def work(rank, folder, results):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    for operation in ("MAX", "MIN", "SUM"):
        for holder in range(RANKS):
            value = torch.tensor([float("nan") if rank == holder else float(rank)])
            dist.all_reduce(value, getattr(dist.ReduceOp, operation))
            if rank == 0:
                results[operation, holder] = value.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(work, (sys.argv[1], results), RANKS)
        lost = {key: value == value for key, value in results.items()}
    print(f"torch {torch.__version__}, Gloo, {RANKS} ranks, one of which holds NaN")
    for (operation, holder), gone in lost.items():
        print(f"  {operation} with the NaN on rank {holder}: {'a number' if gone else 'NaN'}")
    expected = {(o, h): o != "SUM" and h > 0 for o in ("MAX", "MIN", "SUM") for h in range(RANKS)}
    raise SystemExit(0 if lost == expected else "the behaviour has changed")
PY
"$folder/venv/bin/python" "$folder/ranks.py" "$folder"
