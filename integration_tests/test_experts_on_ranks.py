"""A step of a mixture of experts on several ranks equals that of one rank in float64.

Covers sequence parallelism, and numbers of tokens that are not divisible by the tensor-parallel
size. Samples end in padding of different lengths, which is not routed. Experts drop the tokens that
are late in their sequences, the same ones on any ranks.
"""

import pytest
import torch
from megatron_models import GPTConfig, Placement, gpt_chunks
from megatron_parallel import Mesh, ParallelLayout, parameter_views
from megatron_parallel.testing import WorkerPool
from megatron_train.engine import StepEngine
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import MicroBatch

MODEL = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=50,
    max_position_embeddings=16,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    moe_aux_loss_coeff=0.5,
    moe_z_loss_coeff=0.1,
    moe_expert_capacity_factor=0.8,
    moe_token_drop_policy="position",
    init_method_std=0.3,
)


def batch(number: int, samples: int, length: int) -> dict[str, torch.Tensor]:
    """Returns samples of a micro-batch; the first one ends in `number` tokens of padding."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(MODEL.vocab_size, (samples, length + 1), generator=generator)
    documents = torch.zeros(samples, length, dtype=torch.int32)
    documents[0, length - number :] = -1
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (documents >= 0).float(),
        "document_ids": documents,
        "positions": torch.arange(length, dtype=torch.int32).expand(samples, length).contiguous(),
    }


def step(mesh: Mesh, samples: int, length: int, dispatcher: str):
    """Returns the losses of a step of two micro-batches, and this rank's shards of gradients."""
    stages = gpt_chunks(MODEL, Placement(mesh, dtype=torch.float64, dispatcher=dispatcher))
    engine = StepEngine(GPTTask(stages, None, reset_attention_mask=True), mesh)
    drawn = (batch(number, samples, length) for number in (1, 3))
    batches = [MicroBatch.from_fields(fields, token_field="tokens") for fields in drawn]
    denominators = engine.denominators(batches)
    sums = engine.run(batches, denominators, 1)
    views = parameter_views(engine.stages.gradients(), engine.stages.table, mesh)
    parts = [(name, v.offsets, v.tensor.clone()) for name, held in views.items() for v in held]
    return {name: float(sums[name] / denominators[name]) for name in sums}, parts


@pytest.mark.parametrize(
    ("layout", "samples", "length", "dispatcher"),
    [
        pytest.param({"cp": 2}, 2, 8, "allgather", id="cp2"),
        pytest.param({"cp": 2, "ep": 2}, 1, 12, "alltoall", id="cp2-ep2"),
        pytest.param({"tp": 2}, 1, 9, "allgather", id="tp2-odd"),
        pytest.param({"tp": 2, "ep": 2, "etp": 1}, 3, 7, "alltoall", id="tp2-ep2-odd"),
    ],
)
def test_a_step_equals_that_of_one_rank(
    worker_pool: WorkerPool, layout, samples, length, dispatcher
) -> None:
    losses, whole = step(Mesh.single(), samples, length, dispatcher)
    expected = {name: gradient for name, _, gradient in whole}
    assert len(losses) == 3
    seen = set()
    place = ParallelLayout(**layout, dp=1)
    for found, parts in worker_pool.run_mesh(place, step, samples, length, dispatcher):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, offsets, gradient in parts:
            seen.add(name)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, gradient.shape, strict=True))
            torch.testing.assert_close(gradient, expected[name][box], rtol=1e-9, atol=1e-12)
    assert seen == expected.keys()
