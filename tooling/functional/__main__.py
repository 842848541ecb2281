"""Trains models in the layouts of Megatron-LM's functional tests: `nox -s functional`.

    python -m functional [--only PATTERN] [--write docs/functional-matrix.md]

Each run has 50 steps, on one rank and in every layout, on data prepared by megatron-data. A second
run continues from the checkpoint after step 25; its losses and its last checkpoint must equal those
of the uninterrupted run bit by bit. Losses must fall, and must equal those on one rank within
`TOLERANCE`: the runs are in float32, where rounding differs; dropout does not depend on the layout.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from layouts.output import Table, publish
from megatron_ckpt import find_checkpoint
from megatron_train import read_records

from functional.cases import LAYOUTS, MODELS, STEPS, STOP, layout_flags

TOLERANCE = 2e-3
"""Largest difference of a loss to that on one rank, in nats."""

SHOWN = (1, STOP, STEPS)
"""Steps whose losses the table has."""

Losses = Mapping[int, Mapping[str, float]]
"""The losses of steps by name."""


def run(words: str, folder: Path) -> None:
    """Runs a command in a folder.

    Raises:
        RuntimeError: It failed; the message is its last line.
    """
    name, *arguments = shlex.split(words)
    line = [str(Path(sys.executable).with_name(name)), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{words}: {''.join(last)}")


def losses_of(folder: Path, names: Sequence[str]) -> Losses:
    """Returns the losses of each step that a run recorded."""
    records = read_records(folder / "metrics.jsonl").train
    return {record["iteration"]: {name: record[name] for name in names} for record in records}


def measured(kind: str, layout: str, folder: Path) -> tuple[Losses, str]:
    """Trains a model in a layout, and again from the checkpoint in the middle.

    Returns:
        The losses of all steps, and what is wrong with the continued run, or nothing.
    """
    model = MODELS[kind]
    words = f"{model.train} {layout_flags(layout)}--save-interval {STOP}"
    whole, again = (folder / f"{kind} {layout} {name}".replace(" ", "-") for name in ("all", "end"))
    run(f"{words} --save {whole}", folder)
    middle = f"iter_{STOP:07}"
    again.mkdir()
    shutil.copytree(whole / middle, again / middle)
    run(f"{words} --save {again} --load {again}", folder)
    losses, continued = (losses_of(path, model.losses) for path in (whole, again))
    if [*continued] != [*range(STOP + 1, STEPS + 1)]:
        return losses, f"the continued run has the steps {[*continued]}"
    if any(continued[step] != losses[step] for step in continued):
        return losses, "losses of the continued run differ"
    manifests = [
        (find_checkpoint(path).path / "MANIFEST.json").read_bytes() for path in (whole, again)
    ]
    return losses, "" if manifests[0] == manifests[1] else "the last checkpoints differ"


def row(found: Losses, alone: Losses, names: Sequence[str], wrong: str) -> tuple[list[str], str]:
    """Returns the cells of a layout, and what is wrong with its losses, or nothing."""
    cells = [", ".join(f"{found[step][name]:.4f}" for name in names) for step in SHOWN]
    worst = max(abs(found[step][name] - alone[step][name]) for step in alone for name in names)
    cells += [f"{worst:.0e}", "no" if wrong else "bit for bit"]
    for name in names[:1]:
        if not found[STEPS][name] < found[1][name] - 0.5:
            wrong = wrong or f"the {name} does not fall: {found[1][name]} to {found[STEPS][name]}"
    if worst > TOLERANCE:
        wrong = wrong or f"a loss differs by {worst:.1e} from one rank"
    return cells, wrong


def main(words: Sequence[str] | None = None) -> int:
    """Runs the matrix; returns 0 if all runs are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="models that have this name")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page to put the table into")
    options = parser.parse_args(words)
    titles = [f"step {step}" for step in SHOWN]
    table = Table(["model", "layout", *titles, "to one rank", "continued after step 25"])
    table.keys = [(kind, layout) for kind in MODELS for layout in LAYOUTS]
    if options.write is not None:
        table.rows |= table.rows_of(options.write.read_text())
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, model in MODELS.items():
            if options.only not in kind:
                continue
            for command in model.prepare:
                run(command, folder)
            alone: Losses = {}
            for layout in LAYOUTS:
                found, wrong = measured(kind, layout, folder)
                alone = alone or found
                table.rows[kind, layout], wrong = row(found, alone, model.losses, wrong)
                print(kind, layout, *table.rows[kind, layout], wrong, sep=" | ", flush=True)
                if wrong:
                    failed.append(f"{kind}, {layout}: {wrong}")
    return publish("functional", table.text(), failed, options.write)


if __name__ == "__main__":
    sys.exit(main())
