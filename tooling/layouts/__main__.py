"""`nox -s layouts`: proves every layout, plants every defect, prints both tables."""

import argparse
import sys
import time
from pathlib import Path

import torch
from megatron_parallel.testing import WorkerPool
from tqdm import tqdm

from layouts.cases import CASES, Case
from layouts.defects import DEFECTS
from layouts.output import publish
from layouts.proof import prove, prove_fp32

DEFECT_STEPS = 3


def main() -> int:
    """Runs everything; returns 0 if every layout is equal and every defect is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in the workers
    failed: list[str] = []
    started = time.monotonic()
    with (
        WorkerPool(max_ranks=8, collective_timeout=60, timeout=300) as pool,
        tqdm(total=len(CASES) + len(DEFECTS), unit="proof", disable=None) as bar,
    ):
        text = layouts_table(pool, bar, failed) + "\n" + defects_table(pool, bar, failed)
    minutes = (time.monotonic() - started) / 60
    text += f"\nMeasured in {minutes:.1f} minutes with torch {torch.__version__} on Gloo.\n"
    return publish("layouts", text, failed, arguments.write)


def layouts_table(pool: WorkerPool, bar: "tqdm[None]", failed: list[str]) -> str:
    """Proves every layout; returns the table."""
    lines = [
        "| layout | ranks | model | dropout | micro-batches | loss | norm | gradients | parameters "
        "| rerouted | fp32 loss | fp32 norm |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        bar.set_postfix_str(case.title)
        try:
            found, rough = prove(pool, case), prove_fp32(pool, case)
        except Exception as error:  # noqa: BLE001 - one failure must not end an hour of proofs
            failed.append(f"{case.title} failed: {error}")
            continue
        finally:
            bar.update()
        if not (found.equal and rough.equal):
            failed.append(f"{case.title} is not equal to one rank: {found}, {rough}")
        numbers = [found.loss, found.norm, found.gradient, found.parameter]
        words = [*facts(case), *(f"{number:.0e}" for number in numbers)]
        words.append("" if found.rerouted is None else str(found.rerouted))
        words += [f"{number:.0e}" for number in (rough.loss, rough.norm)]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def facts(case: Case) -> list[str]:
    """Returns the first columns of a case."""
    dropout = "on" if case.dropout else "off"
    batches = "by length" if case.room else str(case.accumulation)
    return [case.name, str(case.layout.world_size), case.model, dropout, batches]


def defects_table(pool: WorkerPool, bar: "tqdm[None]", failed: list[str]) -> str:
    """Plants every defect; returns the table."""
    cases = {case.title: case for case in CASES}
    lines = [
        "| planted defect | layout | loss | norm | gradients | parameters |",
        "|---|---|---|---|---|---|",
    ]
    for defect in DEFECTS.values():
        bar.set_postfix_str(defect.name)
        case = cases[defect.case]
        try:
            found = prove(pool, case, defect=defect.name, steps=DEFECT_STEPS)
        except Exception as error:  # noqa: BLE001
            failed.append(f"{defect.name} ({defect.case}) failed: {error}")
            continue
        finally:
            bar.update()
        if found.equal:
            failed.append(f"not found: {defect.name} ({defect.case})")
        numbers = (found.loss, found.norm, found.gradient, found.parameter)
        cells = " | ".join(f"{number:.0e}" for number in numbers)
        lines.append(f"| {defect.name} | {case.name} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
