"""Finds the graph breaks of a small copy of a job, in which Dynamo traces every stage.

The copy has a small layout, a layer of each kind and the options of the job (`shrink_run`), but the
widths and the dtype of the job, which decide which kernels are used. One rank of it runs a step on
an imagined mesh and an imagined GPU, so Dynamo traces the branches of a GPU with the collectives of
every axis. Graphs are not compiled further.
"""

import dataclasses
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from megatron_models import with_layers
from megatron_parallel import Mesh
from megatron_parallel.imagined import imagined_device
from megatron_train.config.run import RunConfig
from megatron_train.dry_run.rank import imagine_trainer, proof_batch
from megatron_train.dry_run.repetition import find_repetition
from megatron_train.prove.shrink import kept_layers, shrink_run
from torch._dynamo import symbolic_convert

_MAX_RANKS: Final = 64
_FOLLOWS: Final = "may have been caused by an earlier graph break"
_PLACE: Final = re.compile(r"in user code at (.*?:\d+)")


def find_graph_breaks(run: RunConfig, pipeline_rank: int, device: str) -> set[str]:
    """Returns the code lines at which graphs of the stages of a rank end.

    Dynamo reports a break in a function again for each of its callers. Such reports are not
    counted, nor are functions that Dynamo skips after a break in them.

    Args:
        run: The run.
        pipeline_rank: Coordinate of the rank on the axis ``pp`` of the run.
        device: Device to imagine, "cuda" or "cpu".

    Raises:
        RuntimeError: Dynamo traced nothing.
    """
    small = _small(run)
    own = pipeline_rank * (small.layout.pp - 1) // max(1, run.layout.pp - 1)
    rank, batch = small.layout.ranks_of_pipeline_rank(own)[0], proof_batch(small)
    sizes = (find_repetition(small, own).short,)
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    with (
        Mesh.imagined(small.layout, rank, device) as mesh,
        imagined_device(device),
        _reported_breaks() as reports,
    ):
        trainer = imagine_trainer(small, mesh, batch, sizes)
        trainer.callbacks = []
        for stage in trainer.engine.task.stages:
            stage.compile(dynamic=False, backend=count)
        trainer.run()
    if not graphs:
        raise RuntimeError("Dynamo traced no stage")
    found = {_PLACE.search(report) for report in reports if _FOLLOWS not in report}
    return {place[1] for place in found if place is not None}


@contextmanager
def _reported_breaks() -> Iterator[list[str]]:
    """Yields a list, to which Dynamo's reports of graph breaks are added."""
    reports = list[str]()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reports.append(record.getMessage())

    log, collector = symbolic_convert.graph_break_log, Collector()
    level, propagates = log.level, log.propagate
    log.addHandler(collector)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield reports
    finally:
        log.removeHandler(collector)
        log.setLevel(level)
        log.propagate = propagates


def _small(run: RunConfig) -> RunConfig:
    """Returns the small copy with the widths and the dtype of the run."""
    small = shrink_run(run, 1, _MAX_RANKS).run
    layers = [layer for stage in kept_layers(run, small.layout) for layer in stage]
    training = dataclasses.replace(
        small.training, float64=False, bf16=run.training.bf16, fp16=run.training.fp16
    )
    return dataclasses.replace(
        small,
        model=with_layers(run.model, layers),
        training=training,
        optimizer=run.optimizer,
    )
