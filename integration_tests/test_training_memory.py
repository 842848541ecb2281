"""`training_memory` equals the bytes of parameters, gradients and optimizer state."""

from dataclasses import asdict

import pytest
import torch
from megatron_models import GPTConfig, Placement, TrainingMemory, gpt_chunks, training_memory
from megatron_optim import Optimizer, OptimizerConfig, StateFormatConfig, state_bytes
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


def held(
    mesh: Mesh,
    config: GPTConfig,
    data_parallel: DataParallelConfig,
    dtype,
    formats: StateFormatConfig | None = None,
) -> TrainingMemory:
    """Returns the bytes that a rank holds after a step."""
    split = (range(1), range(1, 2)) if mesh.layout.pp > 1 else None
    stages = gpt_chunks(config, Placement(mesh, dtype=dtype), split=split)
    engine = StepEngine(GPTTask(stages, None), mesh, data_parallel)
    rule = OptimizerConfig(lr=0.1, adam_beta2=0.95)
    optimizer = Optimizer(engine.stages, rule, formats=formats)
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
    return TrainingMemory(
        parameters=sum(v.tensor.nbytes for views in engine.stages.views().values() for v in views)
        if data_parallel.use_torch_fsdp2
        else nbytes(engine.stages.parameters.values()),
        gradients=gradients,
        optimizer=sum(tensor.nbytes for tensor in optimizer.state_tensors()),
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


AWARE = {"use_precision_aware_optimizer": True}
HALF_SUMS = DataParallelConfig(
    use_distributed_optimizer=True, accumulate_allreduce_grads_in_fp32=False
)
# Bytes of a parameter on every rank, and bytes that d ranks share.
PRECISIONS = {
    "float32": ("float32", SHARDED, {}, 8, 8),
    "bfloat16": ("bfloat16", SHARDED, {}, 6, 12),
    "float16": ("float16", SHARDED, {}, 6, 12),
    # Gradients in fp16, and fp32 copies of a rank's shard of them in the optimizer step.
    "float16-sums": ("float16", HALF_SUMS, {}, 4, 16),
    "bfloat16-sums": ("bfloat16", HALF_SUMS, {}, 4, 16),
    "remainder": ("bfloat16", SHARDED, AWARE, 6, 10),
    "bf16-state": (
        "bfloat16",
        SHARDED,
        {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        6,
        6,
    ),
    "fp16-state": (
        "bfloat16",
        SHARDED,
        {**AWARE, "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"},
        6,
        6,
    ),
    "fp8-state": (
        "bfloat16",
        SHARDED,
        {**AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"},
        6,
        5,
    ),
    "pure-bf16": ("bfloat16", SHARDED, {**AWARE, "main_params_dtype": "bf16"}, 6, 8),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2), pytest.param(4, marks=SLOW)])
def test_the_bytes_of_each_precision_equal_the_closed_form(
    worker_pool: WorkerPool, ranks: int
) -> None:
    """Megatron-LM's table has 4 + 16/d, 6 + 12/d and 8 + 8/d bytes for the first precisions."""
    layout = ParallelLayout(dp=ranks)
    rule = OptimizerConfig(adam_beta2=0.95)
    for dtype, data_parallel, settings, everywhere, shared in PRECISIONS.values():
        formats = StateFormatConfig(**settings)
        found = worker_pool.run_mesh(
            layout, held, DENSE, data_parallel, getattr(torch, dtype), formats
        )
        count = found[0].parameters // getattr(torch, dtype).itemsize
        copies = 4 * count if data_parallel is HALF_SUMS else 0
        total = sum(rank.total for rank in found) + copies
        assert total == pytest.approx(count * (everywhere * ranks + shared), rel=3e-4)
        said = training_memory(
            DENSE,
            8,
            1,
            dtype,
            layout=layout,
            data_parallel=data_parallel,
            state_bytes=state_bytes(rule, formats),
            main_bytes=formats.main_bytes(dtype),
            activations=False,
        )
        assert total - copies == pytest.approx(ranks * said.total, rel=3e-4)
