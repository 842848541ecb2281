"""`nox -s families`: proves every family and prints one table of the measured errors."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layouts.output import Table, publish
from layouts.proof import STEPS
from megatron_models import ConfigError
from megatron_parallel import LayoutError
from megatron_parallel.testing import WorkerError, WorkerPool
from megatron_train.prove.compare import LIMIT as LAYOUT_LIMIT
from tqdm import tqdm

from families import parity, ranks
from families.case import FamilyCase, cases
from families.draws import drawn
from families.real import REAL_MODELS, logits_of_real_weights

DRAWS, ROUND_TRIPS = 25, 5
REFUSED, DASH = "refused", "\N{EN DASH}"

Measure = Callable[[FamilyCase, dict[str, Any], Path], float]

DRAWN: tuple[tuple[str, Measure, int, float, str], ...] = (
    ("logits", parity.logits, DRAWS, parity.LIMIT, ".0e"),
    ("bf16 ratio", parity.bfloat16, DRAWS, parity.RATIO_LIMIT, ".2f"),
    ("gradients", parity.gradients, DRAWS, parity.LIMIT, ".0e"),
    ("round trip", parity.round_trip, ROUND_TRIPS, parity.LIMIT, ".0e"),
)
"""Checks over drawn settings: name, function, number of draws, limit and format of a cell."""


def main(words: Sequence[str] | None = None) -> int:
    """Proves families; returns 0 if all errors are within their limits.

    The page of `--write` keeps the rows of families that are not named.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    parser.add_argument("family", nargs="*", help="families to prove; all by default")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)  # as in the workers
    chosen = [cases()[name] for name in arguments.family] or list(cases().values())
    started = time.monotonic()
    proofs = Proofs()
    with WorkerPool(max_ranks=4, collective_timeout=60, timeout=300) as pool:
        for case in (bar := tqdm(chosen, unit="family", disable=None)):
            bar.set_postfix_str(case.family)
            proofs.add(case, pool)
    if arguments.family and arguments.write is not None:
        proofs.keep(arguments.write.read_text())
    minutes = (time.monotonic() - started) / 60
    text = f"{proofs.text()}\nMeasured in {minutes:.0f} minutes with torch {torch.__version__}"
    import transformers

    text += f" and transformers {transformers.__version__}"
    text += f": {len(chosen)} families, the others before.\n" if arguments.family else ".\n"
    return publish("families", text, proofs.failed, arguments.write)


class Proofs:
    """The rows of the table, the reasons of refusals, and the checks that failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        checks = (name for name, *_ in DRAWN)
        self._table = Table(
            ("family", *checks, *ranks.AXES, "decode", "real weights"),
            [(name,) for name in cases()],
        )
        self._refusals: dict[str, list[str]] = {}

    def add(self, case: FamilyCase, pool: WorkerPool) -> None:
        """Measures one family."""
        self._refusals[case.family] = []
        row = [
            self._cell(case, name, partial(worst, measure, case, count), limit, form)
            for name, measure, count, limit, form in DRAWN
        ]
        for axis in ranks.AXES:
            row.append(self._cell(case, axis, partial(of_layout, pool, case, axis), LAYOUT_LIMIT))
        row.append(
            self._cell(case, "decode", partial(ranks.decoding, pool, case), ranks.DECODE_LIMIT)
        )
        with tempfile.TemporaryDirectory() as folder:
            measure = partial(logits_of_real_weights, case, Path(folder))
            row.append(titled(case, self._cell(case, "real weights", measure, 1e-3)))
        self._table.rows[(case.family,)] = row

    def keep(self, page: str) -> None:
        """Takes rows and refusals of families that were not measured from a page."""
        self._table.rows = self._table.rows_of(page) | self._table.rows
        kept = self._refusals.copy()
        for line in page.splitlines():
            name, comma, _ = line.removeprefix("- ").partition(", ")
            if line.startswith("- ") and comma and name in cases() and name not in kept:
                self._refusals.setdefault(name, []).append(line)

    def text(self) -> str:
        """Returns the table, then the reasons of what is refused."""
        reasons = [line for name in cases() for line in self._refusals.get(name, ())]
        return self._table.text() + "".join(
            f"{line}\n" for line in (["", *reasons] if reasons else [])
        )

    def _cell(
        self,
        case: FamilyCase,
        what: str,
        measure: Callable[[], float | None],
        limit: float,
        form: str = ".0e",
    ) -> str:
        """Returns the measured error, or a dash if the check does not apply to the family."""
        try:
            found = measure()
        except (ConfigError, LayoutError, WorkerError) as error:
            reason = refusal(error)
            if reason is None:
                self.failed.append(f"{case.family}: {what}: {error}")
                return "failed"
            self._refusals[case.family].append(f"- {case.family}, {what}: {reason}")
            return REFUSED
        except Exception as error:  # noqa: BLE001 - one failure must not end the other proofs
            self.failed.append(f"{case.family}: {what}: {type(error).__name__}: {error}")
            return "failed"
        if found is None:
            return DASH
        if not found <= limit:
            self.failed.append(f"{case.family}: {what}: {found:.1e} is above {limit:.0e}")
        return format(found, form)


def titled(case: FamilyCase, cell: str) -> str:
    """Returns the cell of real weights with the name of the model, if there is one."""
    model = REAL_MODELS.get(case.family)
    if model is None:
        return cell
    return f"{model.title}: {'not installed' if cell == DASH else cell}"


def worst(measure: Measure, case: FamilyCase, count: int) -> float:
    """Returns the largest value of a check over draws of settings."""
    found = []
    for settings in drawn(case.draws, count):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(case, settings, Path(folder)))
    return max(found)


def of_layout(pool: WorkerPool, case: FamilyCase, axis: str) -> float | None:
    """Returns the largest difference of a layout; None if the family has no such axis."""
    if axis not in ranks.every_layout(case):
        return None
    found = ranks.layout(pool, case, axis, STEPS)
    if found.rerouted:
        raise ValueError(f"{found.rerouted} tokens were sent to other experts")
    return max(found.loss, found.norm, found.gradient, found.parameter)


def refusal(error: Exception) -> str | None:
    """Returns why a model is refused on ranks; None if the error is another one."""
    if not isinstance(error, WorkerError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    names = (ConfigError.__name__, LayoutError.__name__)
    for line in reversed(lines):
        name, _, reason = line.partition(": ")
        if name.rpartition(".")[2] in names:
            return reason
    return None


if __name__ == "__main__":
    sys.exit(main())
