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
from megatron_optim.matrices import matrix_cost
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
