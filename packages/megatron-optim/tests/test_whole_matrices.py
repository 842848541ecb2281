"""A rule that needs matrices gets them whole on data-parallel ranks, and its shard under tp."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from types import ModuleType
from unittest.mock import patch

import megatron_parallel.extensions as extensions
import pytest
import torch
from megatron_optim import OptimError, Optimizer, OptimizerConfig, StateTensor, UpdateRule
from megatron_optim.matrices import (
    Matrices,
    TensorParallelMode,
    map_matrices,
    matrix_cost,
)
from megatron_optim.rule_registry import RULES, UpdateRuleKind
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    ParameterBuffers,
    Sharding,
    TrainableParameters,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor
from torch.nn import Parameter

TABLE = {
    "word": Sharding((7, 30), vocabulary=True),
    "up": Sharding((2, 6, 30), axis="tp", dim=1, fused_dim=0),
    "down": Sharding((30, 20), axis="tp", dim=1),
    "gain": Sharding((200,)),
    "late": Sharding((9, 30)),
}
SHARDED = DataParallelConfig(use_distributed_optimizer=True, whole_matrices=True)


class Normalised(UpdateRule):
    """Momentum divided by the Frobenius norm, which needs the whole matrix."""

    needs = "matrices"
    state = (StateTensor("momentum"),)

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.seen: set[tuple[int, ...]] = set()

    def update(self, parameters, gradients, state, *, lr, weight_decay, step):  # type: ignore[no-untyped-def]
        self.seen |= {tuple(parameter.shape) for parameter in parameters}
        for parameter, gradient, momentum in zip(
            parameters, gradients, state["momentum"], strict=True
        ):
            momentum.mul_(0.9).add_(gradient)
            norm = torch.linalg.matrix_norm(momentum, keepdim=True)
            parameter.mul_(1 - lr * weight_decay).sub_(lr * momentum / norm)


@contextmanager
def installed() -> Iterator[None]:
    """Registers the rule as an entry point in the current process."""
    module = ModuleType("strange_matrices")
    module.Normalised = Normalised  # type: ignore[attr-defined]
    name, rule = "normalised", "strange_matrices:Normalised"
    module.KIND = UpdateRuleKind(name, "for this test", rule)  # type: ignore[attr-defined]
    entry = EntryPoint(name, "strange_matrices:KIND", RULES.group)
    with (
        patch.dict(sys.modules, {"strange_matrices": module}),
        patch.object(extensions, "entry_points", lambda group: [entry]),
    ):
        yield


def drawn(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * list(TABLE).index(name) + seed)
    return torch.randn(TABLE[name].shape, generator=generator, dtype=torch.float64)


def steps(mesh: Mesh, config: DataParallelConfig, times: int = 20) -> dict[str, object]:
    """Trains on four samples a step, split over the data-parallel ranks."""
    with installed():
        settings = OptimizerConfig(optimizer="normalised", clip_grad=0.5, weight_decay=0.1)
        weights = {n: Parameter(drawn(n, 0)[TABLE[n].box(mesh).slices].clone()) for n in TABLE}
        buffers = GradientBuffers(weights, TABLE, mesh, config)
        shards = [ParameterBuffers([], buffers, TABLE)] if config.use_distributed_optimizer else []
        optimizer = Optimizer(
            TrainableParameters(weights, TABLE, mesh, gradients=buffers.gradients, shards=shards),
            settings,
        )
        data = mesh.axis("dp")
        for step in range(times):
            samples = range(data.index, 4, data.size)
            for number, sample in enumerate(samples):
                buffers.begin(last=number + 1 == len(samples))
                terms = []
                for name, weight in weights.items():
                    factor = drawn(name, 1 + sample)[TABLE[name].box(mesh).slices]
                    terms.append((weight * factor).sin().sum() * (step + 1))
                sum(terms).backward()
            buffers.finish()
            optimizer.step(1e-2)
            buffers.zero()
        (rule,) = {g.rule for g in optimizer._groups if g.matrices} or {None}
        return {
            "weights": {name: weight.detach() for name, weight in weights.items()},
            "seen": sorted(rule.seen) if rule else [],
            "state": {
                name: [(view.tensor.clone(), view.offsets, view.lengths) for view in views]
                for name, views in optimizer.views().items()
            },
            "elements": sum(bucket.plan.numel for bucket in buffers.buckets),
        }


@pytest.mark.parametrize("ranks", [2, 4])
def test_twenty_steps_of_a_distributed_optimizer_equal_one_rank(
    worker_pool: WorkerPool, ranks: int
) -> None:
    whole = steps(Mesh.single(), DataParallelConfig())
    assert whole["seen"] == [(9, 30), (12, 30), (30, 20)]
    found = worker_pool.run_mesh(ParallelLayout(dp=ranks), steps, SHARDED)
    assert sorted(shape for rank in found for shape in rank["seen"]) == whole["seen"]
    for rank in found:
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, whole["weights"][name], rtol=0, atol=1e-12)
    for name, ((expected, _, _),) in whole["state"].items():
        restored = torch.full_like(expected, torch.nan)
        for rank in found:
            for part, offsets, lengths in rank["state"].get(name, []):
                place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
                restored[place] = part
        torch.testing.assert_close(restored, expected, rtol=0, atol=1e-12)


def test_tensor_parallel_ranks_have_their_shard_of_a_matrix(worker_pool: WorkerPool) -> None:
    parts = [(6, 30), (9, 30), (30, 10)]
    for rank in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), steps, DataParallelConfig(), 1):
        assert rank["seen"] == parts
        for name in ("up", "down"):
            assert (
                rank["weights"][name].numel() == TABLE[name].matrix[0] * TABLE[name].matrix[1] // 2
            )
    found = worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), steps, SHARDED, 1)
    assert sorted(shape for rank in found for shape in rank["seen"]) == sorted(2 * parts)


def test_sharded_matrices_are_refused(worker_pool: WorkerPool) -> None:
    def message(mesh: Mesh) -> str:
        with pytest.raises(OptimError) as caught:
            steps(mesh, DataParallelConfig(use_distributed_optimizer=True), 1)
        return str(caught.value)

    for text in worker_pool.run_mesh(ParallelLayout(dp=2), message):
        assert "the update rule needs whole matrices, but this rank updates a shard of" in text
        assert "DataParallelConfig(whole_matrices=True)" in text


def test_the_work_of_a_matrix_is_that_of_a_product_with_its_transpose() -> None:
    for shape, work in (((7, 5), 7 * 5 * 5), ((5, 7), 7 * 5 * 5), ((1, 9), 9), ((6,), 1)):
        assert matrix_cost(Sharding(shape)) == work


def test_two_weights_of_one_dim_are_separate_matrices_unless_they_are_not_split() -> None:
    cut = Sharding((2, 5, 3), fused_sizes=(2, 3))
    whole = torch.arange(30, dtype=torch.float64).view(cut.shape)
    shapes = []

    def times(matrices: Tensor) -> Tensor:
        shapes.append(tuple(matrices.shape))
        return matrices * len(shapes)

    expected = torch.cat([whole[:, :2], 2 * whole[:, 2:]], 1)
    assert torch.equal(map_matrices(cut, whole, times), expected)
    assert shapes == [(1, 4, 3), (1, 6, 3)]  # the rows of two groups
    shapes.clear()
    dtype = {"dtype": torch.float64, "model_dtype": torch.float64}
    matrices = Matrices(["a"], {"a": cut}, Mesh.single(), {}, **dtype)
    assert torch.equal(matrices.map_local([whole], times)[0], expected)
    shapes.clear()
    assert torch.equal(matrices.map_local([whole], times, split_fused_sizes=False)[0], whole)
    assert shapes == [(1, 10, 3)]


@pytest.mark.parametrize(
    ("tp", "cut", "shared"),
    [
        (4, Sharding((2, 14, 12), "tp", 0, spill_dim=1, fused_sizes=(6, 4, 4)), "a"),
        (2, Sharding((2, 14, 12), "tp", 0, spill_dim=1, fused_sizes=(6, 4, 4)), None),
        (4, Sharding((2, 8, 12), "tp", 0, spill_dim=1), None),
        (4, Sharding((4, 14, 12), "tp", 0, fused_sizes=(6, 4, 4)), None),
    ],
)
def test_ranks_share_an_entry_if_they_cut_fused_weights_of_one_group_of_heads(
    tp: int, cut: Sharding, shared: str | None
) -> None:
    mesh, dtype = Mesh(ParallelLayout(tp=tp, dp=1), 0), torch.float32
    matrices = Matrices(["a"], {"a": cut}, mesh, {}, dtype=dtype, model_dtype=dtype)
    assert matrices.shared_entry() == shared


def computed(mesh: Mesh, mode: TensorParallelMode) -> list[tuple[int, ...]]:
    """Returns the shapes of the matrices that this rank computes, of two that ranks share."""
    cut, shapes = Sharding((4, 6), "tp", 0), []

    def same(matrices: Tensor) -> Tensor:
        shapes.extend(tuple(matrix.shape) for matrix in matrices)
        return matrices

    dtype = {"dtype": torch.float32, "model_dtype": torch.float32}
    matrices = Matrices("ab", dict.fromkeys("ab", cut), mesh, {}, **dtype)
    shards = [torch.ones(cut.local_shape(mesh)) for _ in "ab"]
    found = matrices.map_local(shards, same, tensor_parallel=mode)
    assert all(torch.equal(one, other) for one, other in zip(found, shards, strict=True))
    return shapes


@pytest.mark.parametrize(
    ("mode", "shapes"),
    [("distributed", [(4, 6)]), ("duplicated", [(4, 6)] * 2), ("blockwise", [(2, 6)] * 2)],
)
def test_ranks_divide_the_matrices_or_compute_all_of_them(
    worker_pool: WorkerPool, mode: TensorParallelMode, shapes: list[tuple[int, ...]]
) -> None:
    assert worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), computed, mode) == [shapes] * 2


def test_a_rule_that_gathers_matrices_refuses_flat_shards_of_them() -> None:
    """It gathers boxes of fully sharded parameters, but not ranges of elements."""
    mesh, cut = Mesh.single(), {"late": TABLE["late"]}
    weights = {"late": Parameter(drawn("late", 0))}
    buffers = GradientBuffers(
        weights, cut, mesh, DataParallelConfig(use_distributed_optimizer=True)
    )
    shards = [ParameterBuffers([], buffers, cut)]
    given = {"gradients": buffers.gradients, "shards": shards}
    with pytest.raises(OptimError, match="needs whole matrices, but this rank updates a shard"):
        Optimizer(TrainableParameters(weights, cut, mesh, **given), OptimizerConfig("muon"))
