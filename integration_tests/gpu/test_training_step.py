"""Training steps on one GPU equal those of the CPU, are repeatable, and use no host tensor."""

from typing import Any

import pytest
import torch
from megatron_parallel import DataParallelConfig, RecomputeConfig
from megatron_train.cuda_graphs import CudaCapture, GraphBackend
from megatron_train.engine import StepEngine

pytestmark = pytest.mark.gpu

LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "num_query_groups": 2,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 32}
SELECTIVE = RecomputeConfig(granularity="selective", modules=("core_attn", "mlp", "layernorm"))
WHOLE = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "dropout": {"dropout": 0.1},
    "llama": {"config": LLAMA},
    "full recompute": {"dropout": 0.1, "recompute": WHOLE},
    "selective recompute": {"dropout": 0.1, "recompute": SELECTIVE},
    "separate accumulation": {
        "data_parallel": DataParallelConfig(gradient_accumulation_fusion=False)
    },
    "experts": {"config": EXPERTS},
    "experts, all-to-all": {"config": EXPERTS, "dispatcher": "alltoall"},
    "shared expert": {"config": SHARED, "dropout": 0.1},
}

# The rounding error of a sum of n products is at most n units in the last place of the sum of their
# absolute values. The longest sums are over the vocabulary (97) and the tokens of a step (64). A
# gradient passes 4 products a layer and the output, forward and backward: 2 * (4 * 2 + 1) = 18.
PRODUCTS = 18
FP32 = torch.finfo(torch.float32).eps * 97 * PRODUCTS
# In bf16 every result is rounded again when it is stored; sums are in fp32.
BF16 = torch.finfo(torch.bfloat16).eps * PRODUCTS


def assert_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Asserts that each error is at most the tolerance times the largest value of its tensor."""
    assert got.keys() == expected.keys()
    for name, true in expected.items():
        largest = float(true.double().abs().max())
        error = float((got[name].double() - true.double()).abs().max())
        assert error <= tolerance * largest, f"{name}: {error:.2e} of {largest:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_the_cpu(job, device, name):
    losses, gradients = job(device, **CASES[name]).gradients()
    true_losses, true_gradients = job(torch.device("cpu"), **CASES[name]).gradients()
    assert losses == pytest.approx(true_losses, rel=FP32)
    assert_close(gradients, true_gradients, FP32)


@pytest.mark.parametrize("name", ["gpt2", "dropout", "llama", "experts"])
def test_bf16_differs_from_fp32_by_rounding(job, device, name):
    in_bf16 = job(device, dtype=torch.bfloat16, **CASES[name])
    in_fp32 = job(torch.device("cpu"), **CASES[name])
    with torch.no_grad():  # both start with weights that are exact in bf16
        for parameter in in_fp32.engine.stages.parameters.values():
            parameter.copy_(parameter.bfloat16())
    losses, gradients = in_bf16.gradients()
    true_losses, true_gradients = in_fp32.gradients()
    main = {"lm loss": true_losses["lm loss"]}
    assert {"lm loss": losses["lm loss"]} == pytest.approx(main, rel=BF16)
    if name == "experts":  # rounding routes some tokens to other experts, which is a large change
        return
    assert_close(gradients, true_gradients, BF16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["dropout", "llama", "experts", "experts, all-to-all"])
def test_a_run_is_repeatable(job, device, only_deterministic, name, dtype):
    runs = []
    for _ in range(2):
        one = job(device, dtype=dtype, **CASES[name])
        runs.append(([one.step(iteration) for iteration in (1, 2, 3)], one.weights()))
    (first, first_weights), (second, second_weights) = runs
    assert first == second
    assert all(torch.equal(first_weights[n], w) for n, w in second_weights.items())


@pytest.mark.parametrize("name", ["gpt2", "experts"])
def test_an_optimizer_step_equals_that_of_the_cpu(job, device, name):
    """Starts from equal gradients; AdamW rounds each element about twelve times."""
    ours, true = job(device, **CASES[name]), job(torch.device("cpu"), **CASES[name])
    _, gradients = true.gradients()
    ours.gradients()
    with torch.no_grad():
        for key, gradient in ours.engine.stages.gradients().items():
            gradient.copy_(gradients[key])
    before = true.weights()
    norms = [float(one.optimizer.step(1e-3).grad_norm) for one in (ours, true)]
    eps = torch.finfo(torch.float32).eps
    assert norms[0] == pytest.approx(norms[1], rel=16 * eps)
    for key, weight in true.weights().items():
        allowed = 16 * eps * (before[key].abs() + 1e-3 + (weight - before[key]).abs())
        assert bool(((ours.weights()[key] - weight).abs() <= allowed).all()), key


def test_the_loss_falls(job, device):
    one = job(device, config=LLAMA, dtype=torch.bfloat16)
    batch = one.batches(1)
    one.batches = lambda iteration: batch
    losses = [one.step(iteration)[0]["lm loss"] for iteration in range(1, 13)]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.gpu(real="torch.compile makes kernels for it")
@pytest.mark.parametrize("name", ["gpt2", "dropout", "llama"])
def test_compiled_steps_equal_plain_ones(job, device, name):
    losses, gradients = job(device, compile=True, **CASES[name]).gradients()
    true_losses, true_gradients = job(device, **CASES[name]).gradients()
    assert losses == pytest.approx(true_losses, rel=FP32)
    assert_close(gradients, true_gradients, FP32)


@pytest.mark.gpu(real="it replays CUDA graphs")
@pytest.mark.parametrize("name", ["gpt2", "dropout", "llama", "selective recompute"])
def test_replayed_steps_equal_plain_ones(job, device, name):
    graphs = GraphBackend(CudaCapture(), 1)
    options = {"compile": True, "compile_scope": "layer", "graphs": graphs}
    ours, plain = job(device, **options, **CASES[name]), job(device, **CASES[name])
    for iteration in range(1, 5):  # the second captures, later ones replay
        losses, gradients = ours.gradients(iteration)
        true_losses, true_gradients = plain.gradients(iteration)
        assert losses == pytest.approx(true_losses, rel=FP32)
        assert_close(gradients, true_gradients, FP32)
        with torch.no_grad():
            for one in (ours, plain):
                for parameter in one.engine.stages.parameters.values():
                    parameter.mul_(1.01)
                one.engine.stages.zero()


def test_a_host_tensor_in_the_step_is_refused(job, device, monkeypatch):
    own = StepEngine._own

    def careless(engine, batch):
        return own(engine, batch).with_fields(loss_mask=batch.fields["loss_mask"])

    monkeypatch.setattr(StepEngine, "_own", careless)
    with pytest.raises(RuntimeError, match=r"on the same device, .*two devices, cuda:0 and cpu"):
        job(device).step(1)
    job(torch.device("cpu")).step(1)


@pytest.mark.parametrize(("name", "most"), [("gpt2", 0), ("dropout", 0), ("experts", 8)])
def test_a_step_waits_for_the_device_at_most_as_often_as_listed(
    job, device, device_waits, name, most
):
    one = job(device, **CASES[name])
    one.step(1)  # values that are made once
    batches = one.batches(2)
    with device_waits() as waits:
        denominators = one.engine.denominators(batches)
        one.engine.run(batches, denominators, 2)
        one.optimizer.step(1e-3)
        one.engine.stages.zero()
    assert waits.total() <= most, "\n".join(f"{n} {place}" for place, n in waits.items())
