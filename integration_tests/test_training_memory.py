"""`training_memory` equals the bytes of parameters, gradients and optimizer state."""

from dataclasses import asdict

import pytest
import torch
from megatron_models import GPTConfig, Placement, TrainingMemory, gpt_chunks, training_memory
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import DataParallelConfig, Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from megatron_train.engine import StepEngine
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import MicroBatch

# All sizes are multiples of 64 times the number of ranks, so that no bucket is padded.
DENSE = GPTConfig(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=2,
    ffn_hidden_size=256,
    vocab_size=256,
    max_position_embeddings=128,
)
EXPERTS = GPTConfig(**{**asdict(DENSE), "num_experts": 4, "moe_ffn_hidden_size": 128})
SHARDED = DataParallelConfig(use_distributed_optimizer=True)
FSDP = DataParallelConfig(use_torch_fsdp2=True)
SLOW = pytest.mark.slow
IN_BF16 = DataParallelConfig(accumulate_allreduce_grads_in_fp32=False)


def nbytes(tensors) -> int:
    """Returns the bytes of the storages of tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(mesh: Mesh, config: GPTConfig, data_parallel: DataParallelConfig, dtype) -> TrainingMemory:
    """Returns the bytes that a rank holds after a step."""
    split = (range(1), range(1, 2)) if mesh.layout.pp > 1 else None
    stages = gpt_chunks(config, Placement(mesh, dtype=dtype), split=split)
    engine = StepEngine(GPTTask(stages, None), mesh, data_parallel)
    optimizer = Optimizer(engine.stages, OptimizerConfig(lr=0.1))
    tokens = torch.arange(8).view(1, 8)
    fields = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(1, 8)}
    batch = MicroBatch.from_fields(fields, token_field="tokens")
    engine.run([batch, batch], engine.denominators([batch, batch]), 1)
    if data_parallel.use_torch_fsdp2:
        flats = list(engine.stages.gradients().values())
    else:
        buckets = [bucket for buffers in engine.stages.buffers for bucket in buffers.buckets]
        flats = [b.flat for b in buckets if b.flat is not None]
        alone = [b.parameters.values() for b in buckets if b.flat is None]
        flats += [parameter.grad for some in alone for parameter in some]
    gradients = nbytes(flats)
    optimizer.step(0.1)
    state = [v.tensor for views in optimizer.views().values() for v in views]
    return TrainingMemory(
        parameters=sum(v.tensor.nbytes for views in engine.stages.views().values() for v in views)
        if data_parallel.use_torch_fsdp2
        else nbytes(engine.stages.parameters.values()),
        gradients=gradients,
        optimizer=sum(t.nbytes for t in state),
        activations=0,
    )


@pytest.mark.parametrize(
    ("config", "layout", "data_parallel", "dtype"),
    [
        pytest.param(DENSE, {"dp": 2}, DataParallelConfig(), "bfloat16", id="dp2"),
        pytest.param(DENSE, {"dp": 2}, IN_BF16, "bfloat16", id="dp2-bf16-sums", marks=SLOW),
        pytest.param(DENSE, {"dp": 2}, SHARDED, "bfloat16", id="dp2-sharded"),
        pytest.param(DENSE, {"dp": 2}, SHARDED, "float32", id="dp2-sharded-fp32", marks=SLOW),
        pytest.param(DENSE, {"dp": 2}, FSDP, "bfloat16", id="dp2-fsdp"),
        pytest.param(DENSE, {"tp": 2, "dp": 1}, SHARDED, "bfloat16", id="tp2"),
        pytest.param(DENSE, {"pp": 2, "dp": 1}, DataParallelConfig(), "bfloat16", id="pp2"),
        pytest.param(DENSE, {"cp": 2, "dp": 1}, SHARDED, "bfloat16", id="cp2-sharded", marks=SLOW),
        pytest.param(
            EXPERTS, {"dp": 2, "ep": 2}, DataParallelConfig(), "bfloat16", id="ep2", marks=SLOW
        ),
        pytest.param(EXPERTS, {"dp": 2, "ep": 2}, FSDP, "bfloat16", id="ep2-fsdp"),
        pytest.param(EXPERTS, {"dp": 2}, FSDP, "float32", id="experts-dp2-fsdp", marks=SLOW),
        pytest.param(EXPERTS, {"dp": 2, "ep": 2}, SHARDED, "bfloat16", id="ep2-sharded"),
        pytest.param(EXPERTS, {"dp": 2}, SHARDED, "bfloat16", id="experts-dp2-sharded", marks=SLOW),
    ],
)
def test_the_bytes_of_a_rank_equal_the_formula(
    worker_pool: WorkerPool, config, layout, data_parallel, dtype
) -> None:
    shape = ParallelLayout(**layout)
    ranks = worker_pool.run_mesh(shape, held, config, data_parallel, getattr(torch, dtype))
    said = training_memory(
        config,
        8,
        1,
        dtype,
        layout=shape,
        data_parallel=data_parallel,
        layers=1 if shape.pp > 1 else None,
    )
    ours = ranks[:1] if shape.pp > 1 else ranks  # of the first stage
    states = TrainingMemory(said.parameters, said.gradients, said.optimizer, 0)
    sharded = data_parallel.use_distributed_optimizer or data_parallel.use_torch_fsdp2
    if not sharded:
        assert ours == [states] * len(ours)
        return
    for name in ("parameters", "gradients"):
        assert [getattr(rank, name) for rank in ours] == [getattr(states, name)] * len(ours)
    assert sum(rank.optimizer for rank in ours) == len(ours) * states.optimizer
