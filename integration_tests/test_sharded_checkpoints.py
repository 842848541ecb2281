"""Every layout continues the checkpoints of another as one rank does: float64, 4 steps."""

from pathlib import Path

import pytest
import torch
from layouts.case import Case
from layouts.cases import CASES
from layouts.job import build_trainer
from layouts.proof import LEARNING_RATE, reference
from megatron_ckpt import CheckpointStore
from megatron_parallel import Mesh
from megatron_parallel.testing import WorkerPool
from megatron_train.mesh_coordinator import coordinator_of
from megatron_train.prove.compare import absolute, dict_of, joined
from megatron_train.prove.record import pieces
from megatron_train.saving import views_of

STEPS, HALF = 4, 2
BY_TITLE = {case.title: case for case in CASES if not case.dropout}
ONE = CASES[0].reference


def save(mesh: Mesh, case: Case, folder: Path, dtype: torch.dtype) -> None:
    trainer = build_trainer(mesh, case, STEPS, dtype, LEARNING_RATE)
    steps = trainer.micro_batches(0)
    for _ in range(HALF):
        trainer.step(steps)
    state = {**views_of(trainer), "optimizer": trainer.optimizer.scalars()}
    CheckpointStore(folder, coordinator_of(mesh)).save(HALF, state)


def carry_on(mesh: Mesh, case: Case, folder: Path, steps: int, dtype: torch.dtype) -> list:
    trainer = build_trainer(mesh, case, STEPS, dtype, LEARNING_RATE)
    state = CheckpointStore(folder, coordinator_of(mesh)).load(None, views_of(trainer))
    trainer.optimizer.load_scalars(state["optimizer"])
    trainer.iteration, trainer.consumed_samples = HALF, HALF * 8
    given = trainer.micro_batches(trainer.consumed_samples)
    for _ in range(steps):
        trainer.step(given)
    return pieces(views_of(trainer))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("pp2·dp2·gathered-tied", "tp2-tied"),
        ("pp2·dp2·fsdp-tied", "pp2·dp2·gathered-tied"),
        ("tp2-tied", "dp4(2x2)·fsdp-tied"),
        ("tp2·pp2-biased", "tp2·sp·ep2·etp1·a2a-biased"),
        ("tp2·sp·ep2·etp1·a2a·lora-moe", "tp2·dp2·ep2·lora-moe"),
        pytest.param("dp4(2x2)·fsdp-tied", "tp2·sp·pp2·dp2·gathered-tied", marks=pytest.mark.slow),
        pytest.param("tp2·sp·pp2·dp2·gathered-tied", "pp2·dp2·fsdp-tied", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_in_another_layout_as_on_one_rank(
    worker_pool: WorkerPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before, after = BY_TITLE[saved], BY_TITLE[loaded]
    whole = reference(before.reference, STEPS, torch.float64, LEARNING_RATE)
    torch.set_num_threads(threads)
    worker_pool.run_mesh(before.layout, save, before, tmp_path, torch.float64)
    ranks = worker_pool.run_mesh(after.layout, carry_on, after, tmp_path, HALF, torch.float64)
    parameters = [
        [p for p in rank if not p[0].endswith(("exp_avg", "exp_avg_sq"))] for rank in ranks
    ]
    assert absolute(joined(parameters), dict_of(whole.parameters)) <= 1e-9


@pytest.mark.parametrize("loaded", ["pp2·dp2·gathered-tied", "pp2·dp2·fsdp-tied"])
def test_main_weights_of_bf16_survive_bit_for_bit(
    worker_pool: WorkerPool, tmp_path: Path, loaded: str
) -> None:
    (first,) = worker_pool.run_mesh(ONE.layout, saved_state, ONE, tmp_path)
    after = BY_TITLE[loaded]
    ranks = worker_pool.run_mesh(after.layout, carry_on, after, tmp_path, 0, torch.bfloat16)
    assert any(name.endswith(".main") for name in first)
    assert absolute(joined(ranks), first) == 0


def saved_state(mesh: Mesh, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    save(mesh, case, folder, torch.bfloat16)
    return dict_of(carry_on(mesh, case, folder, 0, torch.bfloat16))
