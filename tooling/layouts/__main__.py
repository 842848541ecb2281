"""`nox -s layouts`: proves every layout, plants every defect, prints both tables.

With `--only` or `--missing` some rows are measured; the page of `--write` keeps its others.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from megatron_parallel.testing import WorkerPool
from tqdm import tqdm

from layouts.case import Case
from layouts.cases import CASES
from layouts.defects import DEFECTS, Defect
from layouts.output import Table, publish
from layouts.proof import prove, prove_fp32

DEFECT_STEPS = 3

LAYOUT_COLUMNS = (
    *("layout", "ranks", "model", "dropout", "micro-batches"),
    *("loss", "norm", "gradients", "parameters", "rerouted", "fp32 loss", "fp32 norm"),
)
DEFECT_COLUMNS = ("planted defect", "layout", "loss", "norm", "gradients", "parameters")


class NotProvenError(Exception):
    """A layout is not equal to one rank, or a planted defect was not found."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        table: Its table.
        key: Its first cells.
        title: Its name for `--only` and the progress bar.
        measure: Returns its other cells.
    """

    table: Table
    key: tuple[str, ...]
    title: str
    measure: Callable[[WorkerPool], Sequence[str]]


def main() -> int:
    """Runs everything; returns 0 if every layout is equal and every defect is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    parser.add_argument(
        "--only",
        type=re.compile,
        default=re.compile(""),
        metavar="PATTERN",
        help="measure rows whose name contains this regular expression",
    )
    parser.add_argument(
        "--missing", action="store_true", help="measure rows that the page of --write lacks"
    )
    arguments = parser.parse_args()
    if arguments.missing and arguments.write is None:
        parser.error("--missing needs --write")
    torch.set_num_threads(1)  # as in the workers
    tables = Table(LAYOUT_COLUMNS), Table(DEFECT_COLUMNS)
    every = [*layout_rows(tables[0]), *defect_rows(tables[1])]
    for row in every:
        row.table.keys.append(row.key)
    chosen = [row for row in every if arguments.only.search(row.title)]
    page = arguments.write.read_text() if arguments.write else ""
    if arguments.missing:
        chosen = [row for row in chosen if row.key not in row.table.rows_of(page)]
    failed: list[str] = []
    started = time.monotonic()
    with (
        WorkerPool(max_ranks=8, collective_timeout=60, timeout=300) as pool,
        tqdm(chosen, unit="proof", disable=None) as bar,
    ):
        for row in bar:
            bar.set_postfix_str(row.title)
            try:
                row.table.rows[row.key] = row.measure(pool)
            except Exception as error:  # noqa: BLE001 - one failure must not end an hour of proofs
                failed.append(f"{row.title}: {error}")
    minutes = (time.monotonic() - started) / 60
    torch_version = f"with torch {torch.__version__} on Gloo"
    text = f"Measured in {minutes:.1f} minutes {torch_version}."
    if len(chosen) < len(every):
        for table in tables:
            table.rows = table.rows_of(page) | table.rows
        rows = f"{len(chosen)} of {len(every)} rows in {minutes:.1f} minutes"
        text = f"Measured in several runs {torch_version}; the last one measured {rows}."
    text = f"{tables[0].text()}\n{tables[1].text()}\n{text}\n"
    return publish("layouts", text, failed, arguments.write)


def layout_rows(table: Table) -> list[Row]:
    """Returns a row for every layout, which proves it."""

    def measure(case: Case, pool: WorkerPool) -> list[str]:
        # In fp32 the order of a sum changes which of two numbers in few bits is the nearest.
        found, rough = prove(pool, case), None if case.fp8 else prove_fp32(pool, case)
        if not (found.equal and (rough is None or rough.equal)):
            raise NotProvenError(f"not equal to one rank: {found}, {rough}")
        numbers = [found.loss, found.norm, found.gradient, found.parameter]
        words = [f"{number:.0e}" for number in numbers]
        words.append("" if found.rerouted is None else str(found.rerouted))
        if rough is None:
            return [*words, "", ""]
        return [*words, *(f"{number:.0e}" for number in (rough.loss, rough.norm))]

    return [Row(table, facts(case), case.title, partial(measure, case)) for case in CASES]


def facts(case: Case) -> tuple[str, ...]:
    """Returns the first columns of a case."""
    dropout = "on" if case.dropout else "off"
    batches = "by length" if case.room else str(case.accumulation)
    return case.name, str(case.layout.world_size), case.model, dropout, batches


def defect_rows(table: Table) -> list[Row]:
    """Returns a row for every defect, which plants it."""
    cases = {case.title: case for case in CASES}

    def measure(defect: Defect, pool: WorkerPool) -> list[str]:
        found = prove(pool, cases[defect.case], defect=defect.name, steps=DEFECT_STEPS)
        if found.equal:
            raise NotProvenError("the defect is not found")
        numbers = (found.loss, found.norm, found.gradient, found.parameter)
        return [f"{number:.0e}" for number in numbers]

    return [
        Row(
            table,
            (defect.name, cases[defect.case].name),
            f"{defect.name} ({defect.case})",
            partial(measure, defect),
        )
        for defect in DEFECTS.values()
    ]


if __name__ == "__main__":
    sys.exit(main())
