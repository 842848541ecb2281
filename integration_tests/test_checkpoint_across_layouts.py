"""Every layout loads the checkpoints of every other, on several processes."""

from pathlib import Path

import pytest
import torch
from megatron_ckpt import CheckpointStore, DistributedCoordinator
from megatron_parallel import Mesh, ParallelLayout, Sharding, parameter_views
from megatron_parallel.sharding import normal_
from megatron_parallel.testing import WorkerPool

# Every kind of sharding: rows (the vocabulary, padded to 128 rows), columns, a fused pair, experts,
# and replicated. 97 and 36 are not multiples of the numbers of ranks.
TABLE = {
    "embedding.weight": Sharding((97, 6), axis="tp", dim=0, padded=128),
    "up.weight": Sharding((2, 36, 6), axis="tp", dim=1, fused_dim=0),
    "down.weight": Sharding((6, 36), axis="tp", dim=1),
    "norm.weight": Sharding((6,)),
    "experts.up.weight": Sharding((4, 2, 8, 5), "expert_tp", 2, fused_dim=1, experts=True),
    "experts.down.bias": Sharding((4, 8), "expert_tp", 1, experts=True),
}

LAYOUTS = [
    ParallelLayout(dp=1),
    ParallelLayout(dp=2),
    ParallelLayout(tp=2, dp=1),
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(tp=4, dp=1, order="tp-cp-ep-pp-dp"),
    ParallelLayout(dp=2, ep=2),
    ParallelLayout(tp=2, dp=2, ep=4, etp=1),
]


def drawn(mesh: Mesh, seed: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, sharding in TABLE.items():
        tensor = torch.zeros(sharding.local_shape(mesh), dtype=torch.float64, device=mesh.device)
        normal_(tensor, seed=seed, name=name, sharding=sharding, std=1.0, mesh=mesh)
        tensors[name] = tensor
    return tensors


def save(mesh: Mesh, folder: Path) -> None:
    store = CheckpointStore(folder, DistributedCoordinator())
    views = parameter_views(drawn(mesh, seed=7), TABLE, mesh)
    store.save(3, {**views, "consumed_samples": 48})


def load(mesh: Mesh, folder: Path) -> tuple[int, dict[str, bool], dict[str, bool]]:
    """Returns the plain value, and whether each tensor equals a new draw with seeds 7 and 8."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in drawn(mesh, seed=7).items()}
    store = CheckpointStore(folder, DistributedCoordinator())
    plain = store.load(None, parameter_views(tensors, TABLE, mesh))
    right, wrong = (
        {name: torch.equal(tensor, tensors[name]) for name, tensor in drawn(mesh, seed).items()}
        for seed in (7, 8)
    )
    return plain["consumed_samples"], right, wrong


@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_every_layout_loads_what_any_layout_saved(
    rank_pool: WorkerPool, saved: ParallelLayout, tmp_path: Path
) -> None:
    if saved.world_size > rank_pool.max_ranks:
        pytest.skip(f"needs {saved.world_size} devices, this machine has {rank_pool.max_ranks}")
    rank_pool.run_mesh(saved, save, tmp_path)
    for layout in LAYOUTS:
        if layout.world_size > rank_pool.max_ranks:
            continue
        for samples, right, wrong in rank_pool.run_mesh(layout, load, tmp_path):
            assert samples == 48
            assert all(right.values()), f"{layout}: {right}"
            assert not wrong["norm.weight"] and not wrong["down.weight"]
