"""Counts the communication of steps of megatron-train."""

from collections.abc import Iterator

import torch
from megatron_models import Placement, gpt_chunks
from megatron_optim import LearningRateSchedule, Optimizer, OptimizerConfig, WeightDecaySchedule
from megatron_parallel import Mesh
from megatron_train import GPTTask, Trainer
from megatron_train.engine import StepEngine
from megatron_train.tasks.task import MicroBatch

from layouts.traffic.formulas import Totals
from layouts.traffic.jobs import DATA_PARALLEL, LENGTH, MICRO_BATCHES, SAMPLES, STEPS, Job


def count(mesh: Mesh, job: Job) -> Totals:
    """Returns what this rank communicates in a run of `STEPS` steps."""
    stages = gpt_chunks(
        job.config,
        Placement(
            mesh,
            sequence_parallel=job.sequence_parallel,
            cp_comm_type=job.comm,
            dispatcher=job.dispatcher,
        ),
    )
    engine = StepEngine(GPTTask(stages, None), mesh, DATA_PARALLEL[job.kept])
    settings = OptimizerConfig(lr=1e-4, clip_grad=1.0)
    trainer = Trainer(
        engine=engine,
        optimizer=Optimizer(engine.stages, settings),
        learning_rate=LearningRateSchedule(max_lr=1e-4, decay_samples=1000),
        weight_decay=WeightDecaySchedule(start=0.1, end=0.1, samples=STEPS),
        micro_batches=lambda consumed: batches(mesh),
        train_iters=STEPS,
    )
    with mesh.counting() as traffic:
        trainer.run()
    return {(r.axis, r.operation): (r.calls, r.nbytes) for r in traffic.records}


def batches(mesh: Mesh) -> Iterator[list[MicroBatch]]:
    """Yields the micro-batches of every step."""
    generator = torch.Generator().manual_seed(mesh.axis("dp").index)
    ones = torch.ones(SAMPLES, LENGTH)
    for _ in range(STEPS):
        texts = [
            torch.randint(1000, (SAMPLES, LENGTH + 1), generator=generator)
            for _ in range(MICRO_BATCHES)
        ]
        fields = (
            {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": ones} for text in texts
        )
        yield [MicroBatch.from_fields(one, token_field="tokens") for one in fields]
