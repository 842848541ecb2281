"""Counts the graph breaks of a small copy of a job, in which Dynamo traces every stage.

The copy has the layout, the layers of each kind and the options of the job (`shrink_run`), in its
dtype. One rank of it runs a step on an imagined mesh and an imagined GPU, so Dynamo traces the
branches of a GPU with the collectives of every axis. Graphs are not compiled further.
"""

import dataclasses
from typing import Any

import torch
import torch._dynamo.utils
from megatron_parallel import Mesh
from megatron_parallel.imagined import imagined_device
from megatron_train.config.run import RunConfig
from megatron_train.dry_run.rank import imagine_trainer, proof_batch
from megatron_train.dry_run.repetition import find_repetition
from megatron_train.prove.shrink import shrink_run

_MAX_RANKS = 64


def count_graph_breaks(run: RunConfig, pipeline_rank: int, device: str) -> int:
    """Returns the number of graph breaks in the stages of a rank.

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
    torch._dynamo.utils.counters.clear()
    with Mesh.imagined(small.layout, rank, device) as mesh, imagined_device(device):
        trainer = imagine_trainer(small, mesh, batch, sizes)
        trainer.callbacks = []
        for stage in trainer.engine.task.stages:
            stage.compile(dynamic=False, backend=count)
        trainer.run()
    if not graphs:
        raise RuntimeError("Dynamo traced no stage; counting graph breaks needs torch 2.13")
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _small(run: RunConfig) -> RunConfig:
    """Returns the small copy in the dtype of the run, which decides which kernels are used."""
    small = shrink_run(run, 1, _MAX_RANKS).run
    training = dataclasses.replace(small.training, float64=False, bf16=run.training.bf16)
    return dataclasses.replace(small, training=training, optimizer=run.optimizer)
