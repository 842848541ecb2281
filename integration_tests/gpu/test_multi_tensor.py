"""Runs with Adam of a multi-tensor library, replaced by torch's kernels, equal those with torch."""

import sys
from types import ModuleType

import pytest
import torch
from megatron_optim import AdamSettings

pytestmark = pytest.mark.gpu


@pytest.fixture
def calls(monkeypatch):
    """Returns the chunk size, number of lists and number of other arguments of each call."""
    found = []

    def apply(kernel, flag, lists, *numbers):
        return kernel(65536, flag, lists, *numbers)

    def adam_capturable(chunk, flag, lists, *numbers):
        lr, beta1, beta2, eps, step, mode, corrects_bias, decay, inverse = numbers
        found.append((chunk, len(lists), len(numbers)))
        assert (flag.dtype, step.dtype) == (torch.int32, torch.int32)
        assert (lr.dtype, inverse.dtype) == (torch.float32, torch.float32)
        assert (mode, corrects_bias) == (1, 1)
        gradients, parameters, means, squares = lists
        torch._fused_adamw_(
            parameters,
            gradients,
            means,
            squares,
            [],
            [step.float().view(())] * len(parameters),
            lr=lr.view(()),
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=inverse.reciprocal().view(()),
            found_inf=flag.float().view(()),
        )

    for name in ("apex", "apex.multi_tensor_apply", "amp_C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["apex.multi_tensor_apply"].multi_tensor_applier = apply
    sys.modules["amp_C"].multi_tensor_adam = None
    sys.modules["amp_C"].multi_tensor_adam_capturable = adam_capturable
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_with_a_multi_tensor_library_equal_those_with_torch(job, device, calls, dtype):
    made = [
        job(device, dtype=dtype, clip_grad=0.01, settings=AdamSettings(kernels=kernels))
        for kernels in ("torch", "apex")
    ]
    for iteration in (1, 2, 3):
        for one in made:
            one.gradients(iteration)
            if iteration == 2:  # an overflow, which both skip
                next(iter(one.engine.stages.gradients().values())).fill_(torch.inf)
        results = [one.optimizer.step(1e-2) for one in made]
        assert [bool(result.skipped) for result in results] == [iteration == 2] * 2
        for one in made:
            one.engine.stages.zero()
    before, after = (dict(one.optimizer.main.values()) for one in made)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name].cpu(), tensor.cpu(), rtol=1e-6, atol=1e-7)
    groups = [group for group in made[1].optimizer.groups if group.names]
    assert calls == [(65536, 4, 9)] * (3 * len(groups))
