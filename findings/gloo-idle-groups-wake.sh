#!/usr/bin/env bash
# Package:   torch 2.13.0, Gloo on a CPU; seen on 2026-11-28.
# Guess:     a process group without traffic costs memory and threads, but no processor time.
# Behaviour: each Gloo group has a thread of its own that wakes up about 100 times a second for as long
#            as the group exists, on every rank. Ten ranks with 100 groups each wake 100,000 times.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$folder/ranks.py" <<'PY'
import resource
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COUNTS = (1, 21, 41)
SECONDS = 4.0


def work(rank, folder, results):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    groups = [dist.group.WORLD]
    for count in COUNTS:
        groups += [dist.new_group([0, 1]) for _ in range(count - len(groups))]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        time.sleep(SECONDS)
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        if rank == 0:
            results[count] = waits / SECONDS
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(work, (sys.argv[1], results), 2)
        rates = dict(results)
    print(f"torch {torch.__version__}, Gloo, one of two ranks, while nothing is sent")
    for count, rate in rates.items():
        print(f"  {count} groups: {rate:.0f} wake-ups a second")
    each = (rates[COUNTS[-1]] - rates[COUNTS[0]]) / (COUNTS[-1] - COUNTS[0])
    print(f"  each further group: {each:.0f}")
    raise SystemExit(0 if 50 < each < 150 else "the behaviour has changed")
PY
"$folder/venv/bin/python" "$folder/ranks.py" "$folder"
