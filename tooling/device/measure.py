"""Measures jobs, and compares them with the table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.dry_run.dry_run import dry_run

from device.cases import Job
from device.decode import decode
from device.graphs import find_graph_breaks

TABLE: Final = Path(__file__).with_name("table.json")
"""The committed numbers of each job."""

Row = dict[str, int]


def measure(job: Job) -> Row:
    """Returns the numbers of a job."""
    run = resolve_run(build_parser().parse_args(["dry-run", job.kind, *job.flags.split()]))
    if job.new_tokens:
        return decode(run, job.pipeline_rank, job.new_tokens, "cuda")
    (use,) = dry_run(run, "cuda", [job.pipeline_rank])
    counts = use.counts
    return {
        "waits": counts.waits.total(),
        "blocking copies": counts.blocking_copies.total(),
        "kernels": counts.kernels.total(),
        "element-wise bytes": counts.bytes_moved.total(),
        "peak bytes": use.peak,
        "graph breaks": len(find_graph_breaks(run, job.pipeline_rank, "cuda")),
    }


def read_table() -> dict[str, Row]:
    """Returns the committed numbers by the name of the job."""
    found: dict[str, Row] = json.loads(TABLE.read_text())
    return found


def rises(name: str, found: Row, table: Mapping[str, Row]) -> list[str]:
    """Describes each number of a job that is larger than in the table."""
    if name not in table:
        return [f"{name}: not in the table"]
    return [
        f"{name}: {what} rose from {before:,} to {found[what]:,}"
        for what, before in table[name].items()
        if found[what] > before
    ]
