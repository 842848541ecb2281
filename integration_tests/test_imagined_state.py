"""Checkpoint views and generation on ranks of imagined jobs."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from device.decode import decode
from megatron_ckpt.views import box_of, check_tiling
from megatron_models import stored_shapes
from megatron_parallel import Mesh
from megatron_parallel.imagined import imagined_device
from megatron_train.assembly import build_trainer, choose_dtype
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.config.run import RunConfig
from megatron_train.saving import views_of
from megatron_train.tasks.kinds import find_task_kind

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 --bf16 "
    "--max-position-embeddings 64 --vocab-size 1000 --micro-batch-size 2 --global-batch-size 32 "
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 "
TP, PP = "--tensor-model-parallel-size 2 --sequence-parallel ", "--pipeline-model-parallel-size 2 "

NO_BATCHES: Any = SimpleNamespace(training=iter, has_test=False, no_test_reason="")


def resolved(flags: str) -> RunConfig:
    return resolve_run(build_parser().parse_args(["dry-run", "gpt", *(SMALL + flags).split()]))


@pytest.mark.parametrize(
    "flags",
    [
        TP + PP + EXPERTS + "--use-distributed-optimizer --world-size 8",
        pytest.param(TP + PP + "--use-torch-fsdp2 --world-size 8", marks=pytest.mark.slow),
    ],
)
def test_views_of_all_ranks_tile_each_global_tensor(flags: str):
    run = resolved(flags)
    task = find_task_kind(run.task)
    owners = defaultdict(list)
    for rank in range(run.layout.world_size):
        with Mesh.imagined(run.layout, rank) as mesh, imagined_device("cpu"):
            trainer = build_trainer(run, task, NO_BATCHES, mesh, choose_dtype(run))
            for name, views in views_of(trainer).items():
                for view in views:
                    owned = rank, view.replica, box_of(name, view)
                    owners[name, tuple(view.global_shape)].append(owned)
    for (name, shape), held in owners.items():
        check_tiling(name, shape, held)
    shapes = {name: tuple(shape) for name, shape in stored_shapes(run.model).items()}
    states = ("", ".exp_avg", ".exp_avg_sq", ".main")
    assert {*owners} == {(name + end, shape) for name, shape in shapes.items() for end in states}


@pytest.mark.parametrize(("flags", "pipeline_rank"), [(TP, 0), (PP, 1)])
def test_generation_reads_nothing_but_the_chosen_tokens(flags: str, pipeline_rank: int):
    assert decode(resolved(flags), pipeline_rank, 3, "cpu")["waits"] == 0
