"""Imagines one rank of each job on a GPU, and fails if a number rises over the table.

    PYTHONPATH=tooling python -m device [--write] [--only PATTERN]

With ``--write`` the numbers become the table, which tooling/generated_docs.py shows in docs/.
"""

from megatron_parallel.imagined import NoGuardError, load_guard

try:
    load_guard()
except NoGuardError as error:
    print(f"DEVICE NOT CHECKED: {error}")
    raise SystemExit(0) from None

import argparse
import json
import re
import sys

from tqdm import tqdm

from device.cases import JOBS
from device.measure import TABLE, measure, read_table, rises


def main() -> int:
    """Measures the jobs; returns 1 if a number rose."""
    parser = argparse.ArgumentParser(prog="device")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--only", default="", help="jobs whose name matches")
    parser.add_argument("--sample", action="store_true", help="the jobs of `nox -s tests`")
    options = parser.parse_args()
    jobs = [
        job
        for job in JOBS
        if re.search(options.only, job.name) and (job.sample or not options.sample)
    ]
    found = {job.name: measure(job) for job in tqdm(jobs, unit="job", disable=None)}
    table = read_table() if TABLE.exists() else {}
    for name, row in found.items():
        numbers = ", ".join(f"{what} {number:,}" for what, number in row.items())
        sys.stdout.write(f"{name}: {numbers}\n")
    if options.write:
        names = [job.name for job in JOBS if job.name in table | found]
        rows = {name: (table | found)[name] for name in names}
        TABLE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        return 0
    wrong = [line for name, row in found.items() for line in rises(name, row, table)]
    for line in wrong:
        sys.stderr.write(f"device: error: {line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
