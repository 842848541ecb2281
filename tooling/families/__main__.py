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
from layouts.output import publish
from layouts.proof import LIMIT as LAYOUT_LIMIT
from layouts.proof import STEPS
from megatron_models import ConfigError
from megatron_parallel import LayoutError
from megatron_parallel.testing import WorkerError, WorkerPool
from tqdm import tqdm

from families import parity, ranks
from families.case import FamilyCase, cases
from families.draws import drawn
from families.real import logits_of_real_weights

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
    """Proves every family; returns 0 if all errors are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    parser.add_argument("family", nargs="*", help="families to prove; all by default")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)  # as in the workers
    chosen = [cases()[name] for name in arguments.family] or list(cases().values())
    started = time.monotonic()
    table = Table()
    with WorkerPool(max_ranks=4, collective_timeout=60, timeout=300) as pool:
        for case in tqdm(chosen, unit="family", disable=None):
            table.add(case, pool)
    minutes = (time.monotonic() - started) / 60
    text = table.text() + f"\nMeasured in {minutes:.0f} minutes with torch {torch.__version__}"
    import transformers

    text += f" and transformers {transformers.__version__}.\n"
    return publish("families", text, table.failed, arguments.write)


class Table:
    """The rows of the table, the reasons of refusals, and the checks that failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._rows: list[list[str]] = []
        self._refusals: list[str] = []

    def add(self, case: FamilyCase, pool: WorkerPool) -> None:
        """Measures one family."""
        over: Callable[..., Callable[[], float]] = partial(partial, worst)
        row = [
            self._cell(case, "logits", over(parity.logits, case, DRAWS), parity.LIMIT),
            self._cell(case, "bf16", over(parity.bfloat16, case, DRAWS), parity.RATIO_LIMIT, ".2f"),
            self._cell(case, "gradients", over(parity.gradients, case, DRAWS), parity.LIMIT),
            self._cell(
                case, "round trip", over(parity.round_trip, case, ROUND_TRIPS), parity.LIMIT
            ),
        ]
        for axis in ranks.AXES:
            row.append(self._cell(case, axis, partial(of_layout, pool, case, axis), LAYOUT_LIMIT))
        row.append(
            self._cell(case, "decode", partial(ranks.decoding, pool, case), ranks.DECODE_LIMIT)
        )
        real = self._cell(case, "real weights", partial(logits_of_real_weights, case), 1e-3)
        row.append(real if real == DASH or case.weights is None else f"{case.weights[0]}: {real}")
        self._rows.append([case.family, *row])

    def text(self) -> str:
        """Returns the table, then the reasons of what is refused."""
        drawn_ones = (name for name, *_ in DRAWN)
        header = ("family", *drawn_ones, *ranks.AXES, "decode", "real weights")
        lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in self._rows]
        if self._refusals:
            lines += ["", *self._refusals]
        return "\n".join(lines) + "\n"

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
            self._refusals.append(f"- {case.family}, {what}: {reason}")
            return REFUSED
        except Exception as error:  # noqa: BLE001 - one failure must not end the other proofs
            self.failed.append(f"{case.family}: {what}: {type(error).__name__}: {error}")
            return "failed"
        if found is None:
            return DASH
        if not found <= limit:
            self.failed.append(f"{case.family}: {what}: {found:.1e} is above {limit:.0e}")
        return format(found, form)


def worst(measure: Measure, case: FamilyCase, count: int) -> float:
    """Returns the largest value of a check over draws of settings."""
    found = []
    for settings in drawn(case.draws, count):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(case, settings, Path(folder)))
    return max(found)


def of_layout(pool: WorkerPool, case: FamilyCase, axis: str) -> float | None:
    """Returns the largest difference of a layout; None if the family has no such axis."""
    if axis not in ranks.layouts(case):
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
