"""Runs with our own kernel of Adam equal those with torch's, on a GPU."""

import pytest
import torch
from megatron_optim import AdamSettings, OptimizerConfig, UnreadStep, UpdateRule
from megatron_optim.rules import Adam

pytestmark = pytest.mark.gpu(real="Triton kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_with_the_triton_kernel_equal_those_with_torch(job, device, dtype):
    made = [
        job(device, dtype=dtype, clip_grad=0.01, settings=AdamSettings(kernels=kernels))
        for kernels in ("torch", "triton")
    ]
    for iteration in (1, 2, 3):
        before = made[1].weights()
        for one in made:
            one.gradients(iteration)
            if iteration == 2:  # an overflow, which both skip
                next(iter(one.engine.stages.gradients().values())).fill_(torch.inf)
        results = [one.optimizer.step(1e-2) for one in made]
        assert [bool(result.skipped) for result in results] == [iteration == 2] * 2
        for one in made:
            one.engine.stages.zero()
        if iteration == 2:
            assert all(torch.equal(before[n], w) for n, w in made[1].weights().items())
    true, ours = (dict(one.optimizer.main.values()) for one in made)
    weights = made[1].weights()
    for name, main in ours.items():
        torch.testing.assert_close(main.cpu(), true[name].cpu(), rtol=1e-6, atol=1e-6)
        assert torch.equal(weights[name], main.to(dtype).cpu())


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_update_equals_torchs_kernel_at_any_alignment(device, dtype, shift):
    size, names = 3 * 16384 + 1027, ("exp_avg", "exp_avg_sq")
    drawn = torch.randn(4, size + 4, device=device)
    drawn[3].abs_()
    number, skip = torch.tensor(3.0, device=device), torch.tensor(0.0, device=device)
    rounded = torch.zeros(size + 4, dtype=dtype, device=device)[shift : shift + size]
    step = UnreadStep(number, skip, torch.tensor(2.0, device=device), [rounded])
    found = []
    for kernels in ("torch", "triton"):
        rule: UpdateRule = Adam(OptimizerConfig(settings=AdamSettings(kernels=kernels)))
        rows = [row.clone()[shift : shift + size] for row in drawn]
        parameter, gradient, *moments = rows
        rule.prepare({"parameter": parameter})
        state = {name: [moment] for name, moment in zip(names, moments, strict=True)}
        rule.update_unread([parameter], [gradient], state, lr=1e-2, weight_decay=0.1, step=step)
        found.append([parameter, *moments])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert torch.equal(rounded, found[1][0].to(dtype))
