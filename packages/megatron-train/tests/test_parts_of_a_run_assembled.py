"""Which parts a trainer and a run have for the settings that ask for them."""

from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import SingleProcessCoordinator
from megatron_optim import OptimError
from megatron_parallel import Mesh
from megatron_train import assembly
from megatron_train.assembly import build_trainer, choose_dtype
from megatron_train.callbacks import evaluation
from megatron_train.callbacks.log_line import LogLine
from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.pretrain import _Run
from megatron_train.products import products_of
from megatron_train.starting_point import StartingPoint
from megatron_train.tasks.kinds import find_task_kind

from .test_callbacks import REPORT, at
from .test_configuration import MINIMAL, parse

NO_BATCHES = SimpleNamespace(training=iter, has_test=False, no_test_reason="")
OPTIONAL = ("statistics", "observation", "spikes", "averages")


def built(flags, **more):
    config = parse(f"{MINIMAL} --attention-dropout 0 {flags}")
    task, dtype = find_task_kind(config.task), choose_dtype(config)
    return build_trainer(config, task, NO_BATCHES, Mesh.single(), dtype, **more)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("", set()),
        ("--log-num-zeros-in-grad", {"statistics"}),
        ("--log-params-norm", {"statistics"}),
        ("--log-max-attention-logit", {"observation"}),
        ("--qk-clip", {"observation"}),
        ("--skip-grad-norm 5", {"spikes"}),
        ("--ema-decay 0.9", {"averages"}),
    ],
)
def test_a_trainer_has_the_parts_that_its_settings_ask_for(flags, parts):
    trainer = built(flags)
    assert {name for name in OPTIONAL if getattr(trainer, name) is not None} == parts
    assert trainer.optimizer.scaler is None and trainer.train_iters == 10
    assert trainer.evaluates_averages == ("averages" in parts)


def test_a_trainer_has_the_settings_of_its_run():
    trainer = built("--ema-decay 0.75 --ema-evaluate trained --fp16 --loss-scale 8")
    assert trainer.averages.decay == 0.75 and not trainer.evaluates_averages
    assert float(trainer.optimizer.scaler.scale) == 8.0
    assert {p.dtype for p in trainer.engine.stages.parameters.values()} == {torch.float16}
    rates = built("--lr 0.5 --decoupled-lr 0.25 --lr-decay-style constant --weight-decay 0.125")
    assert (rates.learning_rate.at(3), rates.decoupled_learning_rate.at(3)) == (0.5, 0.25)
    assert rates.weight_decay.at(3) == 0.125
    assert built("--iterations-to-skip 3 5")._iterations_to_skip == {3, 5}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload has no effect: the device is a CPU"),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-sq-dtype fp8 --optimizer lion",
            "--exp-avg-sq-dtype fp8 has no effect: the update rule lion has no state exp_avg_sq",
        ),
        (
            "--use-mup --mup-base-hidden-size 4 --optimizer muon",
            "--muon-scale-mode spectral has no learning rates for other widths of a model",
        ),
    ],
)
def test_settings_of_the_optimizer_are_refused_before_a_model_is_built(flags, message, monkeypatch):
    monkeypatch.setattr(assembly, "find_kind", lambda _: pytest.fail("it is built"))
    with pytest.raises((TrainError, OptimError), match=f"^{message}"):
        built(flags)


def test_a_fused_loss_needs_a_model_that_uses_it(monkeypatch):
    flags = "--cross-entropy-fusion-impl linear"
    assert hasattr(built(flags).task.stages[0], "vocabulary_loss")
    plain = SimpleNamespace(build=lambda *_, **__: [torch.nn.Identity()])
    monkeypatch.setattr(assembly, "find_kind", lambda _: plain)
    with pytest.raises(TrainError, match=f"^{flags} has no effect on models of kind gpt, which do"):
        built(flags)


def test_adapters_alone_have_gradients():
    parameters = built("--linear-product lora").engine.stages.parameters
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {name for name in parameters if ".lora_" in name} != parameters.keys()
    assert all(each.requires_grad for each in built("").engine.stages.parameters.values())


def test_weights_may_be_changed_before_the_optimizer_takes_them():
    def prepare(engine):
        for parameter in engine.stages.parameters.values():
            parameter.data.fill_(3.0)

    trainer = built("--bf16", prepare=prepare)
    assert all((value == 3.0).all() for _, value in trainer.optimizer.main.values())


def test_an_adapter_needs_layers_of_its_roles():
    config = parse(f"{MINIMAL} --linear-product lora --lora-target-modules q_proj")
    with pytest.raises(TrainError) as refused:
        products_of(config)
    start = "--linear-product lora is set for q_proj, but a model of kind gpt has "
    assert str(refused.value).startswith(start)
    known = str(refused.value).removeprefix(start).partition(";")[0].split(", ")
    assert known == sorted(known) and all(known) and "q_proj" not in known


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", ["ProgressBar", "LogLine", "Evaluation", "StopAt"]),
        ("--no-progress --eval-iters 0", ["LogLine", "StopAt"]),
        ("--no-progress --tensorboard-dir t", ["LogLine", "TensorBoard", "Evaluation", "StopAt"]),
        (
            "--no-progress --save s",
            ["LogLine", "Recorder", "Evaluation", "TestSetEvaluation", "StopAt", "Saver"],
        ),
    ],
)
def test_a_run_prints_records_evaluates_and_saves_last(flags, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse(f"{MINIMAL} {flags}")
    tests = "TestSetEvaluation" in names
    batches = SimpleNamespace(validation=iter, testing=iter, has_test=tests)
    for rank in (0, 1):
        mesh = Mesh.single() if rank == 0 else SimpleNamespace(rank=1, world_size=1)
        run = _Run(config, Console(silent=True), mesh, None, batches, None, {}, StartingPoint(), {})
        found = [type(callback).__name__ for callback in run.callbacks()]
        output = ("ProgressBar", "LogLine", "Recorder", "TensorBoard")
        assert found == (names if rank == 0 else [each for each in names if each not in output])


def test_a_run_begins_at_random_without_a_checkpoint():
    start = StartingPoint.find(CheckpointConfig(), SingleProcessCoordinator())
    assert start == StartingPoint() and start.family is None


def test_losses_reach_what_records_them(tmp_path, monkeypatch):
    heard = []

    class Heard:
        def __init__(self, *_):
            pass

        def __getattr__(self, name):
            return lambda *losses: heard.append((name, *losses))

    monkeypatch.chdir(tmp_path)
    for name in ("Recorder", "TensorBoard"):
        monkeypatch.setattr(f"megatron_train.pretrain.{name}", Heard)
    config = parse(f"{MINIMAL} --no-progress --save s --tensorboard-dir t --log-interval 1")
    batches = SimpleNamespace(validation=lambda: "abcd", testing=lambda: "ab", has_test=True)
    console = Console(silent=True)
    run = _Run(config, console, Mesh.single(), None, batches, None, {}, StartingPoint(), {})
    for callback in run.callbacks():
        if isinstance(callback, LogLine | evaluation.Evaluation | evaluation.TestSetEvaluation):
            callback.on_step(at(2, train_iters=2), REPORT)
    assert heard == [
        ("record_log_line", 2, {"lm loss": 3.0}),
        ("record_validation", 2, {"lm loss": 4.0}),
        ("write_validation", 2, {"lm loss": 4.0}),
        ("record_test", 2, {"lm loss": 2.0}),
    ]
