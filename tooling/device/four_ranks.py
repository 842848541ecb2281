"""Trains layouts of up to four ranks on the simulated device, and compares them with the CPU.

    PYTHONPATH=tooling python -m device.four_ranks [--write] [--only PATTERN] [--sample]

Each rank runs the float64 training of `layouts` twice in its layout, on the CPU and on a device of
its own (`simulated_device`), over Gloo. It fails on a tensor on the wrong device, a difference
above `LIMIT`, and a number of waits or blocking copies above the committed table. Planted defects
must be found.
"""

from simulated_device import NoGuardError, load_guard

try:
    load_guard()
except NoGuardError as error:
    print(f"DEVICE NOT CHECKED: {error}")
    raise SystemExit(0) from None

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Final

from layouts.case import Case
from layouts.cases import CASES
from megatron_parallel.testing import WorkerError, WorkerPool
from tqdm import tqdm

from device.measure import Row, rises
from device.ranks import DEFECTS, Report, compare_devices

TABLE: Final = Path(__file__).with_name("four_ranks.json")
"""The committed numbers of each layout: of the rank with the largest number."""

LIMIT: Final = 1e-12
"""Largest difference between the device and the CPU, in float64."""

STEPS: Final = 3

SAMPLE: Final = (
    "tp2·sp·dp2·gathered·few-logits-untied",
    "tp2·sp·dp2·ep4·etp1-moe",
)
"""The layouts of `nox -s tests`; defects are planted in the first."""

TITLES: Final = (
    *SAMPLE,
    "pp2·vpp2·dp2·gathered·zb-v-tied",
    "tp2·sp·dp2-untied-dropout",
    "dp4(2x2)·sharded-tied-dropout",
    "pp2·dp2-tied-dropout",
    "pp4-tied-dropout",
    "tp2·pp2·cut·zero-bubble-tied-dropout",
    "pp2·vpp2·dp2·gathered-untied",
    "cp4-untied",
    "cp4·a2a-tied-dropout",
    "cp2·documents·dp2·sharded-untied",
    "cp2·dp2·hybrid(6)-untied-dropout",
    "dp4·gathered·ep2·a2a-moe",
    "pp2·dp2·ep2·a2a·combined-1f1b-moe-gated",
    "dp4·fsdp-untied",
    "tp2·sp·dp2·fsdp-untied",
    "tp2·sp·host-untied-dropout",
)


PRELOAD: Final = ("torch.distributed.tensor", "device.ranks")


def main() -> int:
    """Compares the layouts and plants the defects; returns 1 if one is not as expected."""
    parser = argparse.ArgumentParser(prog="device.four_ranks")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--only", default="", help="layouts and defects whose name matches")
    parser.add_argument("--sample", action="store_true", help="the layouts of `nox -s tests`")
    options = parser.parse_args()
    cases = {case.title: case for case in CASES}
    titles = [t for t in (SAMPLE if options.sample else TITLES) if re.search(options.only, t)]
    defects = [
        name
        for name, defect in DEFECTS.items()
        if re.search(options.only, name) and (defect.sample or not options.sample)
    ]
    table: dict[str, Row] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rows: dict[str, Row] = {}
    wrong: list[str] = []
    with (
        WorkerPool(timeout=300, collective_timeout=60, preload=PRELOAD, device_guard=True) as pool,
        tqdm(total=len(titles) + len(defects), unit="training", disable=None) as bar,
    ):
        for title in titles:
            reports = train(pool, cases[title], STEPS)
            wrong += [f"{title}: {line}" for line in differences(reports)]
            if not isinstance(reports, WorkerError):
                rows[title] = row_of(reports)
                wrong += [] if options.write else rises(title, rows[title], table)
                show(title, reports)
            bar.update()
        for name in defects:
            reports = train(pool, cases[SAMPLE[0]], 1, name)
            found = differences(reports)
            if not isinstance(reports, WorkerError):
                found += rises(SAMPLE[0], row_of(reports), table | rows)
            if not any(re.search(DEFECTS[name].finding, line) for line in found):
                wrong.append(f"the planted defect is not found: {name}; found: {found}")
            bar.update()
    if options.write:
        rows = table | rows
        TABLE.write_text(
            json.dumps({t: rows[t] for t in TITLES if t in rows}, indent=1, ensure_ascii=False)
            + "\n"
        )
    for line in wrong:
        sys.stderr.write(f"device: error: {line}\n")
    return 1 if wrong else 0


def train(
    pool: WorkerPool, case: Case, steps: int, defect: str | None = None
) -> list[Report] | WorkerError:
    """Returns the reports of all ranks, or the error of one."""
    try:
        reports: list[Report] = pool.run(
            compare_devices, case, steps, defect, ranks=case.layout.world_size
        )
    except WorkerError as error:
        return error
    return reports


def differences(reports: list[Report] | WorkerError) -> list[str]:
    """Describes an error of the ranks, or a difference between the device and the CPU."""
    if isinstance(reports, WorkerError):
        first = reports.failures[0]
        return [f"rank {first.rank} {first.summary}\n{first.traceback[-2000:]}"]
    largest = max(report.deviation for report in reports)
    return [] if largest <= LIMIT else [f"differs from the CPU by {largest:.1e}"]


def row_of(reports: list[Report]) -> Row:
    """Returns the largest numbers of any rank."""
    return {
        "waits": max(report.waits.total() for report in reports),
        "blocking copies": max(report.blocking_copies.total() for report in reports),
    }


def show(title: str, reports: list[Report]) -> None:
    """Prints the difference, the waits of every rank, and those of the first by code line."""
    largest = max(report.deviation for report in reports)
    equal = "equal bits" if largest == 0.0 else f"differs by {largest:.1e}"
    waits = ", ".join(str(report.waits.total()) for report in reports)
    sys.stdout.write(f"{title}: {equal}, waits of the ranks in {STEPS} steps: {waits}\n")
    noted = {"waits": reports[0].waits, "blocking copies": reports[0].blocking_copies}
    for what, lines in noted.items():
        for line, count in sorted(lines.items()):
            sys.stdout.write(f"    {what}: {count} {line}\n")


if __name__ == "__main__":
    sys.exit(main())
