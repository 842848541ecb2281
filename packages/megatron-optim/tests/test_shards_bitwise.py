"""Distributed optimizers equal replicated ones to the last bit in fp32, with clipping."""

import pytest
import torch
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import (
    DataParallelConfig,
    Mesh,
    ParallelLayout,
    Sharding,
    TrainableChunks,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

RULES = {
    "adam": OptimizerConfig(weight_decay=0.1, clip_grad=0.3),
    "sgd": OptimizerConfig(optimizer="sgd", weight_decay=0.1, clip_grad=0.3),
    "lion": OptimizerConfig(optimizer="lion", weight_decay=0.1, clip_grad=0.3),
}
SHAPES = {"long": (37, 301), "square": (70, 70), "gain": (301,), "few": (3, 5)}


class Network(nn.Module):
    """Parameters of sizes that shards cut anywhere, and their sharding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.sharding = {name: Sharding(shape) for name, shape in SHAPES.items()}


def steps(mesh: Mesh, rule: str, sharded: bool) -> tuple[list[bytes], dict[str, Tensor]]:
    """Returns norms and clip coefficients as bytes, and the parameters after five steps."""
    network, axis = Network(), mesh.axis("dp")
    config = DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=7000)
    stages = TrainableChunks([network], mesh, config, lambda _: [])
    optimizer = Optimizer(stages, RULES[rule])
    found = []
    for step in range(5):
        for sample in range(axis.index, 8, axis.size):
            generator = torch.Generator().manual_seed(100 * step + sample)
            loss = torch.zeros(())
            for name in SHAPES:
                weight = getattr(network, name)
                direction = torch.randn(weight.shape, generator=generator)
                loss = loss + (weight * direction).sum() / (30.0 if step % 2 else 3000.0)
            loss.backward()
        stages.finish()
        result = optimizer.step(1e-2)
        found.append((float(result.grad_norm), float(result.clip_coefficient)))
        stages.zero()
    stages.wait_for_parameters()
    return found, {name: p.detach().clone() for name, p in network.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_a_distributed_optimizer_equals_a_replicated_one_to_the_last_bit(
    worker_pool: WorkerPool, rule: str, ranks: int
) -> None:
    layout = ParallelLayout(dp=ranks)
    (whole, expected), *others = worker_pool.run_mesh(layout, steps, rule, False)
    assert all(found == whole for found, _ in others)
    coefficients = [coefficient for _, coefficient in whole]
    assert min(coefficients) < 1.0 == max(coefficients)
    for found, weights in worker_pool.run_mesh(layout, steps, rule, True):
        assert found == whole
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
