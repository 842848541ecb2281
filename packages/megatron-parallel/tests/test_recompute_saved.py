"""What is saved and where: counts by module, shards of ranks, settings that exclude one another."""

from typing import Any

import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.recompute import (
    OffloadSavedTensors,
    ShardSavedTensors,
    activation_checkpoint,
    count_saved_activations,
)
from torch import Tensor, nn

F64 = 8


class Block(nn.Module):
    """Two layers, and an operation of the block itself after them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        return y * y  # saves one storage, twice


def test_saved_bytes_belong_to_the_innermost_module_that_runs() -> None:
    block = Block()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with count_saved_activations(block) as saved:
        block(x)
        with torch.no_grad():
            block(x)
    assert saved.by_module == {"up": 3 * 8 * F64, "down": 3 * 16 * F64, "": 3 * 8 * F64}
    assert saved.shapes == [(3, 8), (3, 16), (3, 8)] and saved.nbytes == 3 * 32 * F64
    block(x)  # after the block nothing is counted, and no hook is left
    assert saved.nbytes == 3 * 32 * F64
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in block.modules())


def test_parameters_buffers_and_empty_tensors_are_not_counted() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(4))
    module.register_buffer("table", torch.ones(4))
    with count_saved_activations(module) as saved:
        (module.weight * module.table).sum()
        (torch.empty(0, requires_grad=True) * torch.empty(0)).sum()
    assert (saved.by_module, saved.shapes, saved.nbytes) == ({}, [], 0)


def shards(numel: int, ranks: int) -> list[Tensor]:
    """Returns what each rank saves of one tensor, without communication."""
    layout, found = ParallelLayout(tp=ranks, dp=1), list[Tensor]()
    x = torch.arange(1.0, numel + 1).requires_grad_()
    for rank in range(ranks):
        hooks = ShardSavedTensors(Mesh(layout, rank).axis("tp"))
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t),
            hooks.enabled(),
        ):
            x.sin()
    return found


@pytest.mark.parametrize(
    ("numel", "ranks", "expected"),
    [
        (5, 4, [[1, 2], [3, 4], [5, 0], [0, 0]]),
        (4, 4, [[1], [2], [3], [4]]),
        (3, 4, [[1, 2, 3]] * 4),  # fewer elements than ranks
        (6, 2, [[1, 2, 3], [4, 5, 6]]),
        (3, 1, [[1, 2, 3]]),
    ],
)
def test_each_rank_saves_its_shard(numel: int, ranks: int, expected: list[list[int]]) -> None:
    assert [shard.tolist() for shard in shards(numel, ranks)] == expected


def test_shards_of_one_rank_and_of_few_elements_are_whole_again() -> None:
    for mesh, numel in ((Mesh.single(), 5), (Mesh(ParallelLayout(tp=4, dp=1), 2), 3)):
        x = torch.linspace(0, 1, numel).requires_grad_()
        with ShardSavedTensors(mesh.axis("tp")).enabled():
            y = x.sin()
        y.sum().backward()
        torch.testing.assert_close(x.grad, x.detach().cos())


def test_shared_and_empty_tensors_stay_on_the_device() -> None:
    shared = torch.linspace(1, 2, 8)
    host = OffloadSavedTensors(except_for=[shared])
    x = torch.ones(4, requires_grad=True)
    with host.enabled():
        y = x * shared[:4] + x[:0].sin().sum()
    assert (host.offloaded, host.nbytes) == (0, 0)
    y.sum().backward()
    assert torch.equal(x.grad, shared[:4]) and host.reloaded == 0


def test_a_recomputation_draws_other_random_numbers() -> None:
    """The state of torch's generator is neither saved nor restored."""
    draws: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        draws.append(torch.rand(3))
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    torch.manual_seed(0)
    activation_checkpoint(run, x).sum().backward()
    torch.manual_seed(0)
    assert torch.equal(torch.stack(draws), torch.rand(2, 3))


ALLOWED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"cpu_offloading_num_layers": 1}, "cpu_offloading_num_layers"),
    ({"granularity": "selective"}, None),
    ({"granularity": "selective", "modules": ("layernorm",)}, "modules"),
    ({"granularity": "selective", "modules": ("mlp", "mla_up_proj")}, "modules"),
    ({"modules": ("layernorm",), "cpu_offloading_num_layers": 2}, "cpu_offloading_num_layers"),
    (
        {"granularity": "selective", "modules": ("mlp",), "cpu_offloading_num_layers": 1},
        "cpu_offloading_num_layers",
    ),
    ({"granularity": "full", "method": "block", "num_layers": 1}, None),
    (
        {
            "granularity": "full",
            "method": "uniform",
            "num_layers": 2,
            "distribute_saved_activations": True,
        },
        "distribute_saved_activations",
    ),
]


@pytest.mark.parametrize(("given", "field"), ALLOWED, ids=str)
def test_the_setting_that_needs_hooks_is_named(given: dict[str, Any], field: str | None) -> None:
    assert RecomputeConfig(**given).hooks_field == field


def test_parts_are_selected_with_selective_recomputation_only() -> None:
    assert not RecomputeConfig().selects("core_attn")
    selective = RecomputeConfig(granularity="selective")
    assert selective.selects("core_attn") and not selective.selects("mlp")
    full = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
    assert not full.selects("core_attn")
    with pytest.raises(LayoutError, match="cannot offload what modules mla_up_proj saves"):
        RecomputeConfig(
            granularity="selective", modules=("mla_up_proj",), cpu_offloading_num_layers=1
        )


def test_sharded_activations_need_two_ranks() -> None:
    plan = RecomputeConfig(
        granularity="full", method="block", num_layers=1, distribute_saved_activations=True
    )
    plan.check(ParallelLayout(tp=2), sequence_parallel=False)
    with pytest.raises(LayoutError, match="distribute_saved_activations needs at least 2 tensor"):
        plan.check(ParallelLayout(tp=1), sequence_parallel=False)
    usual = RecomputeConfig()
    for tp in (1, 2):
        usual.check(ParallelLayout(tp=tp), sequence_parallel=True)
