"""Formats of main parameters do not depend on the layout: remainders and stochastic rounding."""

import pytest
import torch
from megatron_optim import Optimizer, OptimizerConfig, StateFormatConfig
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
    "column": Sharding((16, 6), axis="tp", dim=0),
    "row": Sharding((6, 16), axis="tp", dim=1),
    "fused": Sharding((2, 8, 5), axis="tp", dim=1),
    "gain": Sharding((7,)),
}
CONFIG = OptimizerConfig(clip_grad=0.0, adam_beta2=0.95)
SHARDED = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=40)


def drawn(name: str, seed: int) -> Tensor:
    """Returns numbers in eighths, whose sums over ranks are exact."""
    generator = torch.Generator().manual_seed(100 * list(TABLE).index(name) + seed)
    shape = TABLE[name].shape
    return torch.randint(-8, 9, shape, generator=generator) / 8


def steps(mesh: Mesh, main: str, config: DataParallelConfig) -> dict[str, list]:
    """Returns boxes of all parameters after some steps: offsets and values."""
    formats = StateFormatConfig(
        use_precision_aware_optimizer=True,
        main_params_dtype=main,
        exp_avg_dtype="bf16",
        exp_avg_sq_dtype="bf16",
    )
    weights = {
        name: Parameter(drawn(name, 0)[sharding.box(mesh).slices].bfloat16())
        for name, sharding in TABLE.items()
    }
    buffers = GradientBuffers(weights, TABLE, mesh, config)
    shards = [ParameterBuffers([], buffers, TABLE)] if config.use_distributed_optimizer else []
    trainable = TrainableParameters(
        weights, TABLE, mesh, gradients=buffers.gradients, shards=shards
    )
    optimizer = Optimizer(trainable, CONFIG, formats=formats, seed=11)
    data = mesh.axis("dp")
    for step in range(6):
        samples = range(data.index, 4, data.size)
        for number, sample in enumerate(samples):
            buffers.begin(last=number + 1 == len(samples))
            terms = []
            for name, weight in weights.items():
                factor = drawn(name, 1 + sample + 4 * step)[TABLE[name].box(mesh).slices]
                terms.append((weight.float() * factor).sum())
            sum(terms).backward()
        buffers.finish()
        optimizer.step(1e-3)
        buffers.zero()
    return {
        name: [(TABLE[name].box(mesh).slices, weight.detach().clone())]
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("main", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ({"tp": 2, "dp": 1}, DataParallelConfig()),
        ({"dp": 2}, SHARDED),
        ({"tp": 2, "dp": 2}, SHARDED),
    ],
    ids=["tp2", "sharded", "both"],
)
def test_bf16_weights_on_ranks_equal_those_of_one_rank(
    worker_pool: WorkerPool, main: str, layout: dict, config: DataParallelConfig
) -> None:
    whole = steps(Mesh.single(), main, DataParallelConfig())
    for rank in worker_pool.run_mesh(ParallelLayout(**layout), steps, main, config):
        for name, boxes in rank.items():
            for slices, values in boxes:
                assert torch.equal(values, whole[name][0][1][slices]), name
    before = {name: drawn(name, 0).bfloat16() for name in TABLE}
    assert all(not torch.equal(before[name], whole[name][0][1]) for name in TABLE)
