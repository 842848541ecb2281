"""`python -m layouts.traffic`: counts every layout, prints the table."""

import argparse
import sys
from pathlib import Path

from megatron_parallel.testing import WorkerPool
from tqdm import tqdm

from layouts.output import publish
from layouts.traffic.count import count
from layouts.traffic.jobs import JOBS
from layouts.traffic.table import table


def main() -> int:
    """Counts everything; returns 0 if every rank of every layout equals its formula."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    with WorkerPool(max_ranks=8, collective_timeout=60, timeout=300) as pool:
        counted = {job: pool.run_mesh(job.layout, count, job) for job in tqdm(JOBS, disable=None)}
    text, failed = table(counted)
    return publish("traffic", text, failed, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
