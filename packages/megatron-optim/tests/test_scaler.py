"""The loss scale of fp16: rules by hand, skipped steps, and what a checkpoint keeps."""

import math

import pytest
import torch
from megatron_optim import LossScaleConfig, LossScaler, OptimError, Optimizer, OptimizerConfig
from megatron_parallel import Mesh, ParallelLayout, Sharding, TrainableParameters
from megatron_parallel.testing import WorkerPool
from torch.nn import Parameter

CPU = torch.device("cpu")
TABLE = {"a": Sharding((6, 4)), "b": Sharding((4,))}


def scales(config: LossScaleConfig, overflows: str) -> list[float]:
    """Returns the scale after each step; ``x`` is a step that overflows."""
    scaler, found = LossScaler(config, CPU), []
    for step in overflows:
        scaler.update(torch.tensor(step == "x"))
        found.append(float(scaler.scale))
    return found


def test_a_dynamic_scale_follows_the_rules() -> None:
    config = LossScaleConfig(
        initial_loss_scale=16, min_loss_scale=3, loss_scale_window=3, hysteresis=2
    )
    # The first overflow takes 1 from the hysteresis and the second halves. The third halves at
    # once, since only a doubling fills the hysteresis. The minimum is 3.
    assert scales(config, "x.x.x...x..x") == [16, 16, 8, 8, 4, 4, 4, 8, 8, 8, 8, 4]
    assert scales(config, "xxxxx") == [16, 8, 4, 3, 3]
    assert scales(config, "..x......") == [16] * 5 + [32] * 3 + [64]


def test_a_constant_scale_stays_and_is_not_saved() -> None:
    config = LossScaleConfig(loss_scale=1024)
    assert scales(config, "xxx....") == [1024] * 7
    assert LossScaler(config, CPU).scalars() == {}


def test_a_saved_scale_continues() -> None:
    config = LossScaleConfig(loss_scale_window=2)
    one, two = LossScaler(config, CPU), LossScaler(config, CPU)
    for overflow in (True, True, True, False):
        one.update(torch.tensor(overflow))
    assert one.scalars()["loss_scale"] == 2.0**30
    two.load_scalars(one.scalars())
    assert two.scalars() == one.scalars()
    for overflow in (False, True, False, False, True, True):
        for scaler in (one, two):
            scaler.update(torch.tensor(overflow))
        assert one.scalars() == two.scalars()
    with pytest.raises(OptimError, match="the loss scale in the checkpoint is nan"):
        two.load_scalars({**one.scalars(), "loss_scale": math.nan})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_loss_scale": 0.0}, "initial_loss_scale must be above 0 and below"),
        ({"loss_scale": -1.0}, r"loss_scale must be above 0 and below 2\*\*127, got -1.0"),
        ({"hysteresis": 0}, "hysteresis must be at least 1 step, got 0"),
        ({"loss_scale_window": 0}, "loss_scale_window must be at least 1 step"),
        ({"min_loss_scale": 2.0**33}, "min_loss_scale 8589934592.0 exceeds initial_loss_scale"),
        ({"loss_scale": 8.0, "hysteresis": 3}, "hysteresis has no effect on a constant loss_scale"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(OptimError, match=message):
        LossScaleConfig(**settings)


def make(
    mesh: Mesh, dtype: torch.dtype, scale: LossScaleConfig | None, clip: float = 0.5
) -> tuple[dict[str, Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(5)
    parameters = {
        name: Parameter(torch.randn(sharding.shape, generator=generator).to(dtype))
        for name, sharding in TABLE.items()
    }
    trainable = TrainableParameters(parameters, TABLE, mesh)
    config = OptimizerConfig(clip_grad=clip)
    return parameters, Optimizer(trainable, config, loss_scale=scale)


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(s.shape, generator=generator) / 64 for n, s in TABLE.items()}


@pytest.mark.parametrize("clip", [0.0, 0.05, 5.0])
def test_scaled_gradients_give_the_same_update(mesh: Mesh, clip: float) -> None:
    one, plain = make(mesh, torch.float32, None, clip)
    two, scaled = make(mesh, torch.float32, LossScaleConfig(loss_scale=4096.0), clip)
    for step in range(3):
        for name, gradient in gradients(step).items():
            one[name].grad = gradient.clone()
            two[name].grad = gradient * 4096
        before, after = plain.step(1e-2), scaled.step(1e-2)
        assert float(before.grad_norm) == pytest.approx(float(after.grad_norm), rel=1e-12)
        assert float(before.clip_coefficient) == pytest.approx(float(after.clip_coefficient))
        assert before.loss_scale is None and after.loss_scale == 4096
    for name in TABLE:
        torch.testing.assert_close(one[name], two[name], rtol=1e-6, atol=1e-7)


def test_fp16_parameters_have_fp32_main_parameters(mesh: Mesh) -> None:
    parameters, optimizer = make(mesh, torch.float16, LossScaleConfig())
    exact, reference = make(mesh, torch.float32, None)
    for name in TABLE:
        exact[name].data.copy_(parameters[name])
    for step in range(20):
        for name, gradient in gradients(step).items():
            parameters[name].grad = (gradient * 2.0**10).half()
            exact[name].grad = parameters[name].grad.float() / 2.0**10
        optimizer.scaler.scale.fill_(2.0**10)
        optimizer.step(1e-5)
        reference.step(1e-5)
    for name in TABLE:
        main = optimizer.views()[f"{name}.main"][0].tensor
        assert main.dtype == torch.float32
        torch.testing.assert_close(main, exact[name].detach(), rtol=1e-6, atol=1e-8)
        assert torch.equal(parameters[name], main.half())
    assert float((optimizer.views()["a.main"][0].tensor - parameters["a"].detach()).abs().max()) > 0


def overflowing(mesh: Mesh, bad_rank: int | None) -> tuple[list, dict, list]:
    config = LossScaleConfig(initial_loss_scale=64, hysteresis=1, loss_scale_window=3)
    parameters, optimizer = make(mesh, torch.float16, config)
    found = []
    for step in range(6):
        scale = float(optimizer.scaler.scale)
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient.half() * scale
        if step == 2 and mesh.rank == bad_rank:
            parameters["a"].grad[0, 0] = 70_000.0  # infinite in fp16
        before = parameters["a"].detach().clone()
        result = optimizer.step(1e-2, losses=[torch.ones((), dtype=torch.float64)])
        same = torch.equal(before, parameters["a"])
        found.append((scale, bool(result.skipped), bool(result.overflow), same))
    state = {name: views[0].tensor.clone() for name, views in optimizer.views().items()}
    return found, optimizer.scalars(), [state[name] for name in sorted(state)]


def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(
    worker_pool: WorkerPool,
) -> None:
    expected = [(64, False), (64, False), (64, True), (32, False), (32, False), (32, False)]
    layout = ParallelLayout(dp=1, pp=2)  # each rank has its own parameters, but one norm
    results = worker_pool.run_mesh(layout, overflowing, 1)
    for found, scalars, _ in results:
        assert [(scale, skipped) for scale, skipped, _, _ in found] == expected
        assert [overflow for _, _, overflow, _ in found] == [step == 2 for step in range(6)]
        assert [same for *_, same in found] == [step == 2 for step in range(6)]
        assert scalars == {
            "steps": 5,
            "skipped_steps": 1,
            "loss_scale": 64.0,
            "loss_scale_good_steps": 0,
            "loss_scale_hysteresis": 1,
        }
    for one, two in zip(results[0][2], results[1][2], strict=True):
        assert torch.equal(one, two)


def test_a_loss_that_is_not_finite_is_no_overflow(mesh: Mesh) -> None:
    parameters, optimizer = make(mesh, torch.float16, LossScaleConfig())
    for name, gradient in gradients(0).items():
        parameters[name].grad = gradient.half()
    result = optimizer.step(1e-2, losses=[torch.tensor(math.nan, dtype=torch.float64)])
    assert result.skipped and not result.overflow


def test_a_device_that_decides_divides_by_the_scale(mesh: Mesh) -> None:
    """The path of CUDA devices, on a CPU, whose fused implementation takes the same arguments."""
    for clip in (0.0, 0.05):
        one, read = make(mesh, torch.float16, LossScaleConfig(), clip)
        two, unread = make(mesh, torch.float16, LossScaleConfig(), clip)
        unread._host_decides = False
        for step in range(5):
            for name, gradient in gradients(step).items():
                grad = (gradient * 2.0**8).half()
                if step == 3:
                    grad.view(-1)[0] = math.inf
                one[name].grad, two[name].grad = grad, grad.clone()
            for optimizer in (read, unread):
                optimizer.scaler.scale.fill_(2.0**8)
            results = [optimizer.step(1e-2) for optimizer in (read, unread)]
            assert [bool(result.overflow) for result in results] == [step == 3] * 2
        found = unread.views()
        for name, (view,) in read.views().items():  # the moments show the scale of gradients
            torch.testing.assert_close(view.tensor, found[name][0].tensor, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf])
def test_a_saved_scale_that_is_not_positive_is_refused(scale: float) -> None:
    scaler = LossScaler(LossScaleConfig(), CPU)
    with pytest.raises(OptimError, match="it must be positive"):
        scaler.load_scalars({**scaler.scalars(), "loss_scale": scale})
    scaler.load_scalars({**scaler.scalars(), "loss_scale": 0.5})
    assert float(scaler.scale) == 0.5


def test_the_lowest_scale_is_that_of_the_settings() -> None:
    assert LossScaler(LossScaleConfig(min_loss_scale=4.0), CPU).lowest == 4.0
    constant = LossScaler(LossScaleConfig(loss_scale=8.0), CPU)
    assert (constant.lowest, float(constant.scale)) == (8.0, 8.0)
    constant.load_scalars({"loss_scale": 2.0})  # of a run with a dynamic scale
    assert float(constant.scale) == 8.0
