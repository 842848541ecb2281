"""Which checkpoints a run continues, what it takes from them, and what it warns of."""

import re
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_optim import LearningRateSchedule, Optimizer, OptimizerConfig, ParameterAverages
from megatron_parallel import Mesh, Sharding
from megatron_parallel.sharding import ZEROS, StepState
from megatron_train.callbacks.stopping import StopAt
from megatron_train.checkpointing import (
    _match_histories,
    is_checkpoint,
    refuse_other_model,
    restore,
)
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.saving import SavedCheckpoint, Saver

from .conftest import BigramTask
from .test_trainer import weights


class Warned(Console):
    """A console that keeps its warnings."""

    def __init__(self):
        super().__init__(silent=True)
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


@pytest.fixture
def console():
    return Warned()


def save(trainer, folder, run=None, steps=2, interval=None):
    """Trains for some steps and saves; returns the path of the last checkpoint."""
    saver = Saver(CheckpointStore(folder), run or {}, None, interval, None, Console(silent=True))
    trainer.callbacks = [saver, StopAt(steps, None)]
    trainer.run()
    return saver.newest.path


@pytest.fixture
def trained(make_trainer):
    """Returns a function that makes a trainer with an update rule, a task and averages."""

    def make(task=None, averaged=False, rule="adam", **settings):
        engine = StepEngine(task or BigramTask(), Mesh.single())
        config = OptimizerConfig(lr=0.1, optimizer=rule, **settings)
        trainer = make_trainer(engine=engine, optimizer=Optimizer(engine.stages, config))
        if averaged:
            trainer.averages = ParameterAverages(trainer.optimizer, 0.5)
        return trainer

    return make


def momenta(trainer):
    return {
        name: views[0].tensor.clone()
        for name, views in trainer.optimizer.views().items()
        if name.endswith("exp_avg")
    }


# -- what is taken ---------------------------------------------------------------------------------


def test_the_newest_or_the_given_checkpoint_is_continued(trained, tmp_path, console):
    save(trained(), tmp_path, steps=4, interval=2)
    for folder, iteration in ((tmp_path, 4), (tmp_path / "iter_0000002", 2)):
        trainer = trained()
        path = tmp_path / f"iter_000000{iteration}"
        assert restore(trainer, folder, {}, console) == SavedCheckpoint(path, iteration)
        assert (trainer.iteration, trainer.consumed_samples) == (iteration, 6 * iteration)
        assert trainer.optimizer.scalars()["steps"] == iteration
        assert is_checkpoint(path) and not is_checkpoint(tmp_path)
    assert console.warnings == []
    assert not is_checkpoint(tmp_path / "iter_0000003")  # absent
    (tmp_path / "iter_0000003").write_bytes(b"")
    assert not is_checkpoint(tmp_path / "iter_0000003")


def test_the_state_of_the_optimizer_is_left_out_on_request(trained, tmp_path, console):
    first = trained()
    save(first, tmp_path)
    whole, anew = trained(), trained()
    restore(whole, tmp_path, {}, console)
    restore(anew, tmp_path, {}, console, load_optimizer=False)
    for trainer in (whole, anew):
        assert torch.equal(weights(trainer), weights(first)) and trainer.iteration == 2
    assert whole.optimizer.scalars()["steps"] == 2 and anew.optimizer.scalars()["steps"] == 0
    (found,), (kept,), (expected,) = (momenta(t).values() for t in (anew, whole, first))
    assert torch.equal(kept, expected) and expected.any() and not found.any()


def test_averages_continue_begin_or_end(trained, tmp_path, console):
    averaged, plain = tmp_path / "averaged", tmp_path / "plain"
    first = trained(averaged=True)
    path, other = save(first, averaged), save(trained(), plain)
    values = first.averages.tensors["weight"]
    assert not torch.equal(values, weights(first))

    again = trained(averaged=True)
    restore(again, averaged, {}, console)
    assert torch.equal(again.averages.tensors["weight"], values) and console.warnings == []
    ends = trained()
    restore(ends, averaged, {}, console)
    assert torch.equal(weights(ends), weights(first))
    begins, anew = trained(averaged=True), trained(averaged=True)
    restore(begins, plain, {}, console)
    assert console.warnings == [
        f"{path} has averages of weights, which end here: no --ema-decay",
        f"{other} has no averages of weights: they begin with its weights",
    ]
    restore(anew, averaged, {}, console, load_optimizer=False)
    for trainer in (begins, anew):
        assert torch.equal(trainer.averages.tensors["weight"], weights(first))
    assert torch.equal(weights(begins), weights(first))


class Historic(BigramTask):
    """The bigram task with a history of magnitudes of its weight."""

    def __init__(self, length, names=("weight",)):
        super().__init__()
        (table,) = self.stages
        for name in names:
            table.sharding["amax_history"] = Sharding((3, length), init=ZEROS, reduce="max")
            self.state = StepState(
                table, "amax_history", Mesh.single(), lambda value, _: value + 1, parameter=name
            )


def test_histories_of_magnitudes_continue_only_with_their_shape(trained, tmp_path, console):
    long = Historic(4)
    path = save(trained(long), tmp_path)
    assert (long.state.value == 2).all()
    same = Historic(4)
    restore(trained(same), tmp_path, {}, console)
    assert torch.equal(same.state.value, long.state.value)
    restore(trained(), tmp_path, {}, console)  # a run without histories does not need them
    assert console.warnings == []
    short = Historic(2)
    restore(trained(short), tmp_path, {}, console)
    assert not short.state.value.any()
    none = tmp_path / "none"
    bare = save(trained(), none)
    restore(trained(Historic(4)), none, {}, console)
    assert console.warnings == [
        f"{one} has no history of magnitudes of this run's --fp8-recipe delayed for 1 of 1 "
        "weights: it begins anew"
        for one in (path, bare)
    ]


def test_histories_that_do_not_fit_are_counted_among_those_of_the_run(tmp_path, console):
    def histories(**lengths):
        return {f"{name}.amax_history": [3, length] for name, length in lengths.items()}

    shapes = histories(a=4, b=2, c=4, d=4)
    views = {name: [SimpleNamespace(global_shape=(*shape,))] for name, shape in shapes.items()}
    views["a"] = []
    found = SimpleNamespace(path=tmp_path, histories=histories(a=4, b=4, d=4, e=4))
    unused = _match_histories(views, found, console)
    assert unused == {"b.amax_history", "e.amax_history"}
    assert {*views} == {"a", "a.amax_history", "d.amax_history"}
    (warning,) = console.warnings
    assert "--fp8-recipe delayed for 2 of 4 weights: " in warning


# -- what is refused -------------------------------------------------------------------------------


def test_weights_without_a_run_are_not_continued(trained, tmp_path, console):
    trainer = trained()
    views, model = trainer.engine.stages.views(), trainer.task.model_record
    path = CheckpointStore(tmp_path).save(3, dict(views), model=model)
    words = f"{path} has weights but no run to continue; begin a new run with them with --finetune"
    with pytest.raises(TrainError, match=re.escape(words)):
        restore(trainer, tmp_path, {}, console)


RULES = {
    "adam": ("adam", {}, "exp_avg, exp_avg_sq"),
    "momentum": ("sgd", {}, "momentum_buffer"),
    "lion": ("lion", {}, "exp_avg"),
}


@pytest.mark.parametrize(
    ("before", "now"), [("adam", "momentum"), ("lion", "adam"), ("adam", "lion")]
)
def test_the_state_of_another_update_rule_is_refused(trained, tmp_path, console, before, now):
    (rule, settings, state), (other, others, wanted) = RULES[before], RULES[now]
    path = save(trained(rule=rule, **settings), tmp_path, {"optimizer": {"optimizer": rule}})
    with pytest.raises(TrainError) as refused:
        restore(trained(rule=other, **others), tmp_path, {}, console)
    assert str(refused.value).startswith(
        f"{path} was saved with another update rule: it has the optimizer state {state}, and "
        f"--optimizer {other} has {wanted}; give the --optimizer that it was saved with"
    )
    trainer = trained(rule=other, **others)
    restore(trainer, tmp_path, {}, console, load_optimizer=False)
    assert trainer.iteration == 2


def test_a_rule_without_state_continues_itself_alone(trained, tmp_path, console):
    rule = {"rule": "sgd", "sgd_momentum": 0.0}
    path, trainer = save(trained(**rule), tmp_path), trained(**rule)
    restore(trainer, tmp_path, {}, console)
    assert trainer.iteration == 2 and console.warnings == []
    with pytest.raises(TrainError, match=f"^{path} was saved with .* the optimizer state none, an"):
        restore(trained(), tmp_path, {}, console)


def test_a_rule_with_the_same_state_continues_under_another_name(trained, tmp_path, console):
    save(trained(), tmp_path, {"optimizer": {"optimizer": "named otherwise"}})
    trainer = trained()
    restore(trainer, tmp_path, {"optimizer": {"optimizer": "adam"}}, console)
    assert trainer.optimizer.scalars()["steps"] == 2
    (warning,) = console.warnings
    assert "optimizer named otherwise in the checkpoint and adam in this run" in warning


def test_weights_in_bf16_need_the_main_weights_of_a_checkpoint(trained, tmp_path, console):
    def half():
        task = BigramTask()
        task.stages[0].to(torch.bfloat16)
        return trained(task)

    path = save(trained(), tmp_path / "whole")
    with pytest.raises(TrainError, match=rf"{path} has no main weights, because .*--no-load-optim"):
        restore(half(), tmp_path / "whole", {}, console)
    first, second = half(), half()
    save(first, tmp_path / "half")
    restore(second, tmp_path / "half", {}, console)
    assert torch.equal(weights(first), weights(second))
    third = half()
    restore(third, tmp_path / "half", {}, console, load_optimizer=False)
    (view,) = third.optimizer.views()["weight.main"]
    assert torch.equal(view.tensor.view(11, 11), weights(first).float())


@pytest.mark.parametrize(
    ("saved", "current", "tokenizer", "given"),
    [
        ({"vocab_size": 12}, {"vocab_size": 11}, "null-11", " (--vocab-size 11, since Null"),
        ({"vocab_size": 12}, {"vocab_size": 11}, "bytes-0", ", or load another checkpoint"),
        ({"vocab_size": 12}, {"vocab_size": 12}, "null-11", ", or load another checkpoint"),
        ({}, {}, "null-11", ", or load another checkpoint"),
    ],
)
def test_another_model_is_refused_with_the_flag_that_gives_its_vocabulary(
    trained, tmp_path, saved, current, tokenizer, given
):
    trainer = trained()
    trainer.task.model_record = ModelRecord("bigram", None, 0, {"size": 3, **current})
    run = {"tokenizer": {"fingerprint": tokenizer}}
    with pytest.raises(TrainError) as refused:
        other = ModelRecord("bigram", None, 0, {"size": 4, **saved})
        refuse_other_model(trainer, run, other, tmp_path)
    assert "size 4 in the checkpoint and 3 in this run" in str(refused.value)
    assert f"; give the values of the checkpoint{given}" in str(refused.value)
    refuse_other_model(
        trainer, run, ModelRecord("bigram", None, 0, {"size": 4, **current}), tmp_path, ["size"]
    )
    with pytest.raises(TrainError, match="has no record of its model; load another checkpoint"):
        refuse_other_model(trainer, run, None, tmp_path)


def test_a_folder_with_unfinished_checkpoints_alone_has_none(trained, tmp_path, console):
    path = tmp_path / "iter_0000002.tmp-0a"
    path.mkdir()
    assert restore(trained(), tmp_path, {}, console) is None
    (warning,) = console.warnings
    assert str(path) in warning
    assert restore(trained(), tmp_path / "empty", {}, console) is None
    assert console.warnings == [warning]


# -- what is warned of -----------------------------------------------------------------------------

RUN = {
    "data": {"split": "9,1"},
    "tokenizer": {"fingerprint": "a"},
    "seed": {"seed": 1},
    "objective": {"task": "x"},
    "optimizer": {"lr": 0.5},
    "length": {"samples": 48},
}
ORDER = "so some samples may be repeated and others skipped: "


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("tokenizer", {"fingerprint": "b"}, "the tokenizer differs from that before step 2: finge"),
        ("objective", {"task": "y"}, "losses are not comparable with those before step 2: task x"),
        (
            "optimizer",
            {"lr": 0.25},
            "settings of the optimizer differ from those before step 2: lr",
        ),
        ("seed", {"seed": 2}, f"before step 2, {ORDER}seed 1 in the checkpoint and 2 in this run;"),
        ("data", {"split": "8,2"}, f"{ORDER}split 9,1 in the checkpoint and 8,2 in this run; the "),
        ("length", {"samples": 60}, f"{ORDER}samples 48 in the checkpoint and 60 in this run; the"),
    ],
)
def test_an_allowed_change_of_a_run_is_one_warning(trained, tmp_path, console, part, value, words):
    save(trained(), tmp_path, RUN)
    allowed = ("data", "tokenizer", "seed", "objective")
    restore(trained(), tmp_path, {**RUN, part: value}, console, allowed_changes=allowed)
    (warning,) = console.warnings
    assert words in warning
    by_length = "data, seed and, in Megatron's order, the number of samples of the whole run"
    assert (by_length in warning) == (part == "length")
    assert ("--data-path-changes" in warning) == (part in ("seed", "data"))


def test_changes_of_the_order_are_one_warning_and_equal_runs_have_none(trained, tmp_path, console):
    save(trained(), tmp_path, RUN)
    restore(trained(), tmp_path, RUN, console)
    assert console.warnings == []
    changed = {**RUN, "seed": {"seed": 2}, "data": {"split": "8,2"}}
    restore(trained(), tmp_path, changed, console, allowed_changes=("data", "seed"))
    (warning,) = console.warnings
    assert f"{ORDER}split 9,1 in the checkpoint and 8,2 in this run, seed 1 in" in warning


@pytest.mark.parametrize("missing", ["data", "tokenizer", "objective"])
def test_a_part_that_is_not_recorded_is_named_once(trained, tmp_path, console, missing):
    path = save(trained(), tmp_path, {name: RUN[name] for name in RUN if name != missing})
    restore(trained(), tmp_path, RUN, console)
    assert console.warnings == [
        f"{path} has no record of its {missing}, so changes cannot be detected"
    ]
    restore(trained(), tmp_path, {"seed": RUN["seed"]}, console)  # a run without it has no need
    assert len(console.warnings) == 1


# -- schedules -------------------------------------------------------------------------------------

LONGER = LearningRateSchedule(max_lr=0.1, decay_samples=500)
HIGHER = LearningRateSchedule(max_lr=0.2, decay_samples=1000)


def test_schedules_continue_as_chosen(trained, tmp_path, console):
    path = save(trained(), tmp_path)
    own = trained().learning_rate

    def continued(schedule, iterations=8, **options):
        trainer = trained()
        trainer.learning_rate = trainer.decoupled_learning_rate = schedule
        trainer.train_iters = iterations
        restore(trainer, tmp_path, {}, console, **options)
        return trainer.learning_rate

    with pytest.raises(
        TrainError, match=rf"^{path}: the schedule of the learning rate has another "
    ):
        continued(LONGER)
    assert continued(LONGER, iterations=2) == LONGER  # no step follows
    assert console.warnings == []
    with pytest.raises(TrainError, match="another length"):
        continued(LONGER, iterations=3)
    assert continued(LONGER, schedules="checkpoint") == own and console.warnings == []
    assert continued(LONGER, schedules="override") == LONGER
    rates = [f"{each.at(12):.4g}" for each in (own, LONGER)]
    jumps = f"jumps at step 2: {rates[0]} before, {rates[1]} after"
    assert console.warnings == [f"learning rate {jumps}", f"decoupled learning rate {jumps}"]
    console.warnings.clear()
    assert continued(HIGHER) == HIGHER
    (warning,) = console.warnings
    assert warning.startswith("schedules differ from those before step 2, which the run had from ")
    assert "learning rate: max_lr 0.1, now 0.2; decoupled learning rate: max_lr 0.1," in warning
    assert continued(HIGHER, schedules="checkpoint") == own
    assert len(console.warnings) == 1


def test_changed_settings_of_schedules_are_reported_once_and_only_if_they_count(
    trained, tmp_path, console
):
    save(trained(), tmp_path, {"optimizer": {"lr": 0.1, "clip_grad": 1.0}})
    for schedules, now, warnings in (
        ("unchanged", {"lr": 0.2, "clip_grad": 1.0}, ["lr 0.1 in the checkpoint and 0.2"]),
        ("override", {"lr": 0.2, "clip_grad": 1.0}, ["lr 0.1 in the checkpoint and 0.2"]),
        ("checkpoint", {"lr": 0.2, "clip_grad": 1.0}, []),
        ("checkpoint", {"lr": 0.2, "clip_grad": 2.0}, ["clip_grad 1.0 in the checkpoint and 2"]),
    ):
        console.warnings.clear()
        trainer = trained()
        trainer.learning_rate = trainer.decoupled_learning_rate = HIGHER
        restore(trainer, tmp_path, {"optimizer": now}, console, schedules=schedules)
        assert len(console.warnings) == len(warnings)
        for words, warning in zip(warnings, console.warnings, strict=True):
            assert warning.startswith(
                f"settings of the optimizer differ from those before step 2: {words}"
            )
