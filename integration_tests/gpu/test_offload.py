"""Runs and checkpoints with optimizer state in host memory equal those without; one wait a step."""

import pytest
import torch
from megatron_ckpt import CheckpointStore
from megatron_optim import (
    LossScaleConfig,
    OffloadConfig,
    OptimError,
    ParameterAverages,
    StateFormatConfig,
)
from megatron_optim.lion import Lion
from megatron_parallel import DataParallelConfig

pytestmark = pytest.mark.gpu

ALL = OffloadConfig(optimizer_cpu_offload=True)
HALF = OffloadConfig(
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=0.5,
    overlap_cpu_optimizer_d2h_h2d=True,
)
SHARDED = DataParallelConfig(use_distributed_optimizer=True)
FORMATS = StateFormatConfig(
    use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16"
)
CASES = {
    "adam": {},
    "adam in bf16": {"dtype": torch.bfloat16},
    "adam in fp64": {"dtype": torch.float64},
    "sgd": {"rule": "sgd"},
    "sgd with a loss scale": {"rule": "sgd", "loss_scale": LossScaleConfig(loss_scale=8.0)},
    "lion in bf16": {"rule": "lion", "dtype": torch.bfloat16},
    "shards in bf16": {"data_parallel": SHARDED, "dtype": torch.bfloat16},
    "formats in bf16": {"dtype": torch.bfloat16, "formats": FORMATS},
}


@pytest.fixture
def same(request):
    """Returns a function that compares tensors: to the last bit if both devices are the CPU."""
    exact = request.config.getoption("device") == "simulated"

    def compare(ours, theirs) -> bool:
        if exact:
            return torch.equal(ours.cpu(), theirs.cpu())
        return torch.allclose(ours.cpu().float(), theirs.cpu().float(), rtol=1e-2, atol=1e-4)

    return compare


def states(one):
    return {
        name: [view.tensor.cpu().clone() for view in views] for name, views in one.state().items()
    }


@pytest.mark.parametrize("offload", [ALL, HALF], ids=["all", "half"])
@pytest.mark.parametrize("name", CASES)
def test_runs_with_offloaded_state_equal_those_without(job, device, same, name, offload):
    plain, away = (
        job(device, offload=each, clip_grad=0.01, **CASES[name]) for each in (None, offload)
    )
    for iteration in (1, 2, 3):
        for one in (plain, away):
            one.gradients(iteration)
            if iteration == 2:  # an overflow, which both skip
                next(iter(one.engine.stages.gradients().values())).fill_(torch.inf)
        results = [one.optimizer.step(1e-2) for one in (plain, away)]
        assert same(*(result.grad_norm for result in results))
        assert [bool(result.skipped) for result in results] == [iteration == 2] * 2
        plain.engine.stages.zero()
        away.engine.stages.zero()
    before, found = states(plain), states(away)
    assert before.keys() == found.keys()
    for key, tensors in before.items():
        assert all(same(a, b) for a, b in zip(tensors, found[key], strict=True)), key
    held = [t for t in away.optimizer.state_tensors() if t.device.type == "cpu"]
    on_host = sum(t.numel() for t in away.optimizer.main.hosted.values())
    elements = sum(t.numel() for t in away.optimizer.main.tensors.values())
    assert on_host == elements if offload is ALL else 0.4 * elements < on_host <= 0.5 * elements
    assert sum(t.numel() for t in held) >= 2 * on_host  # the main parameters and state


@pytest.mark.parametrize("fraction", [None, 0.5, 1.0])
@pytest.mark.parametrize(
    ("dtype", "formats", "device_bytes", "host_bytes"),
    [
        (torch.float32, None, 8, 12),
        (torch.bfloat16, None, 12, 12),
        (torch.float32, FORMATS, 4, 8),
        (torch.bfloat16, FORMATS, 6, 8),
    ],
    ids=["fp32", "bf16", "fp32-formats", "bf16-formats"],
)
def test_state_takes_the_bytes_of_the_closed_form(
    job, device, dtype, formats, device_bytes, host_bytes, fraction
):
    """The host also has the main parameter of fp32 weights; a gradient of 4 bytes comes on top."""
    offload = None if fraction is None else OffloadConfig(True, fraction)
    optimizer = job(device, dtype=dtype, formats=formats, offload=offload).optimizer
    elements = sum(tensor.numel() for tensor in optimizer.main.tensors.values())
    held = {"cpu": 0, "cuda": 0}
    for tensor in optimizer.state_tensors():
        held[tensor.device.type] += tensor.nbytes
    share = fraction or 0.0
    # Whole tensors are offloaded; blocks of 2,048 elements share a byte.
    assert held["cuda"] / elements == pytest.approx(device_bytes * (1 - share), abs=5e-3)
    assert held["cpu"] / elements == pytest.approx(host_bytes * share, abs=5e-3)


@pytest.mark.parametrize("devices", [(), ("cuda",)], ids=["read", "unread"])
def test_rules_that_cannot_decide_are_updated_on_the_host_as_on_a_cpu(
    job, device, monkeypatch, devices
):
    """With ``cuda`` alone, only the part on the device is updated unread: it rounds otherwise."""
    monkeypatch.setattr(Lion, "decides_on", devices)
    plain, away = (
        job(device, rule="lion", clip_grad=0.01, dtype=torch.float64, offload=each)
        for each in (None, HALF)
    )
    for iteration in (1, 2):
        for one in (plain, away):
            one.step(iteration)
    before, found = states(plain), states(away)
    for key, tensors in before.items():
        for a, b in zip(tensors, found[key], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("there", ["to the host", "to the device"])
def test_a_checkpoint_loads_where_the_state_is_elsewhere(job, device, same, tmp_path, there, dtype):
    source, target = (None, HALF) if there == "to the host" else (HALF, None)
    store = CheckpointStore(tmp_path)
    one = job(device, dtype=dtype, offload=source)
    one.step(1)
    store.save(1, {**one.state(), "steps": one.optimizer.scalars()})
    other = job(device, dtype=dtype, offload=target)
    other.step(7)  # so that all values differ
    other.optimizer.load_scalars(store.load(1, other.state())["steps"])
    for each in (one, other):
        each.step(2)
    weights = other.weights()
    assert all(same(weight, weights[name]) for name, weight in one.weights().items())


@pytest.mark.parametrize("offload", [ALL, HALF], ids=["all", "half"])
def test_a_step_with_offloaded_state_waits_once(job, device, device_waits, offload):
    one = job(device, dtype=torch.bfloat16, offload=offload)
    one.step(1)
    batches = one.batches(2)
    with device_waits() as waits:
        denominators = one.engine.denominators(batches)
        one.engine.run(batches, denominators, 2)
        one.optimizer.step(1e-3)
        one.engine.stages.zero()
    # A real device reports the line that reads the value, not its caller.
    places = "decision.py", "reading.py"
    found = [n for place, n in waits.items() if any(each in place for each in places)]
    assert waits.total() == sum(found) == 1, "\n".join(waits)


def test_weights_without_state_begin_on_the_host(job, device, same):
    one, other = job(device, offload=ALL), job(device)
    with torch.no_grad():
        for each in (one, other):
            for parameter in each.engine.stages.parameters.values():
                parameter.mul_(0.5)
    one.optimizer.reload_model_parameters()
    for each in (one, other):
        each.step(1)
    weights = other.weights()
    assert all(same(weight, weights[name]) for name, weight in one.weights().items())


def test_averages_of_offloaded_parameters_are_refused(job, device):
    with pytest.raises(OptimError, match=r"averages of parameters .* in host memory"):
        ParameterAverages(job(device, offload=HALF).optimizer, 0.9)
