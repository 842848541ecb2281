"""The parts of a run: configuration files, family, saving, stopping and continuing."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import CheckpointError, CheckpointStore, ModelRecord, SingleProcessCoordinator
from megatron_data import ByteTokenizer, load_tokenizer
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_train import CheckpointConfig, DataConfig, RunConfig, TrainingConfig
from megatron_train.assembly import choose_device
from megatron_train.callbacks.stopping import StopAt
from megatron_train.checkpointing import restore
from megatron_train.compiling import require_whole_compiler
from megatron_train.config.dump import write_config
from megatron_train.config.files import read_file
from megatron_train.config.run import build_run
from megatron_train.config.run_sections import run_options
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.pretrain import _deterministic
from megatron_train.saved_values import describe_differences
from megatron_train.saving import SavedCheckpoint, Saver, tokenizer_files
from megatron_train.starting_point import StartingPoint, describe_saved_progress
from megatron_train.trainer import Callback, Stop

MODEL = GPTConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=10,
    max_position_embeddings=4,
)


def run_config(**changes):
    sections = {
        "model": MODEL,
        "data": DataConfig(seq_length=4, data_path=("0.3", "a", "0.7", "b")),
        "training": TrainingConfig(train_iters=3, micro_batch_size=2, bf16=True),
        "optimizer": OptimizerConfig(lr=1e-4),
    }
    return RunConfig(**{**sections, **changes})


def test_a_written_configuration_reads_back_as_the_same_run(tmp_path):
    config = run_config(checkpoint=CheckpointConfig(save="run"))
    path = tmp_path / "run" / "config.yaml"
    write_config(config, path)
    assert build_run(read_file(path, run_options())) == config
    assert [p.name for p in path.parent.iterdir()] == ["config.yaml"]


def family_of(start, name=None, **changes):
    config = run_config(model=dataclasses.replace(MODEL, **changes))
    checkpoint = CheckpointConfig(model_family=name)
    return start.resolve_family(dataclasses.replace(config, checkpoint=checkpoint))


def test_model_family_is_accepted_if_the_model_fits_it():
    assert family_of(StartingPoint()) is None
    assert family_of(StartingPoint(), "gpt2") == "gpt2"
    words = "--model-family gpt2: models of this family have normalization = 'LayerNorm', this o"
    with pytest.raises(TrainError, match=words):
        family_of(StartingPoint(), "gpt2", normalization="RMSNorm")
    with pytest.raises(CheckpointError, match=r"no family 'gtp2' .nearest: 'gpt2'.; installed are"):
        family_of(StartingPoint(), "gtp2")


@pytest.mark.parametrize("flag", ["load", "pretrained_checkpoint"])
def test_a_run_keeps_the_family_of_the_checkpoint_it_starts_from(tmp_path, flag):
    record = ModelRecord("gpt", "llama", 1, MODEL.to_dict())
    CheckpointStore(tmp_path).save(3, {"samples": 1}, model=record)
    start = StartingPoint.find(
        CheckpointConfig(**{flag: str(tmp_path)}), SingleProcessCoordinator()
    )
    assert start.family == family_of(start) == family_of(start, "llama") == "llama"
    with pytest.raises(TrainError, match="holds a model of family llama, which the run keeps"):
        family_of(start, "gpt2")
    one = StartingPoint.find(
        CheckpointConfig(load=str(tmp_path / "iter_0000003")), SingleProcessCoordinator()
    )
    assert one.family == "llama"


def test_a_missing_gpu_is_refused():
    assert choose_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(TrainError, match="torch finds no GPU"):
            choose_device("cuda")


def test_deterministic_mode_ends_with_the_run(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with _deterministic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        with _deterministic(True):
            pass
        assert torch.are_deterministic_algorithms_enabled()  # as before
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with _deterministic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # as torch asks for
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with _deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_differences_are_named_with_both_values():
    assert describe_differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == (
        "b 2 in the checkpoint and 3 in this run, c None in the checkpoint and 4 in this run"
    )
    assert describe_differences({"a": 1}, {"a": 1}) == ""


def test_the_files_of_a_tokenizer_load_as_an_equal_one(tmp_path):
    files = tokenizer_files(ByteTokenizer())
    for name, content in files.items():
        assert name.startswith("tokenizer/")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert load_tokenizer(tmp_path / "tokenizer").fingerprint == ByteTokenizer().fingerprint


class Interrupt(Callback):
    """Interrupts training like a second Ctrl-C."""

    def __init__(self, iteration):
        self.iteration = iteration

    def on_step(self, trainer, report):
        if report.iteration == self.iteration:
            raise KeyboardInterrupt


def interrupted(trainer, folder, interval, at, continued=None):
    """Trains, interrupts after step ``at``, and returns the description of the progress."""
    saver = Saver(CheckpointStore(folder), {}, None, interval, None, Console(silent=True))
    trainer.callbacks = [saver, Interrupt(at)]
    if at > trainer.iteration:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    return describe_saved_progress(
        trainer, CheckpointConfig(save=str(folder)), StartingPoint(), continued
    )


def test_a_run_that_ends_early_reports_what_is_saved_and_how_to_continue(make_trainer, tmp_path):
    trainer, folder = make_trainer(), str(tmp_path)
    assert describe_saved_progress(trainer, CheckpointConfig(), StartingPoint()) == (
        "nothing is saved, because --save is not given"
    )
    saver = Saver(CheckpointStore(tmp_path), {}, None, None, None, Console(silent=True))
    trainer.callbacks = [StopAt(1, None), saver]
    assert trainer.run() == Stop("--exit-interval 1", agreed=True)
    saving = CheckpointConfig(save=folder)
    text = f"saved in {tmp_path}/iter_0000001; the same command"
    assert (
        describe_saved_progress(trainer, saving, StartingPoint())
        == f"{text} with --load {folder} continues it"
    )
    again = CheckpointConfig(save=folder, load=folder)
    assert describe_saved_progress(trainer, again, StartingPoint()) == f"{text} continues it"
    tuned = CheckpointConfig(save=folder, load="base", finetune=True)
    assert (
        describe_saved_progress(trainer, tuned, StartingPoint(origin="base"))
        == f"{text} continues it"
    )


@pytest.mark.parametrize("weights_only", [False, True])
def test_an_interrupted_new_run_reports_which_steps_are_lost(make_trainer, tmp_path, weights_only):
    """A checkpoint whose weights a run began with is not one to continue from."""
    start = StartingPoint(tmp_path, weights_only, origin="base" if weights_only else "")
    again = "the same command" if weights_only else f"the same command with --load {tmp_path}"
    for interval, at, expected in (
        (None, 0, "nothing is saved: no step was completed"),
        (None, 1, "nothing is saved: no checkpoint was complete after 1 step"),
        (4, 3, "nothing is saved: no checkpoint was complete after 3 steps"),
        (2, 4, f"saved in {tmp_path}/iter_0000004; {again} continues it"),
        (
            4,
            5,
            f"1 step since {tmp_path}/iter_0000004 is not saved; {again} continues from "
            "that checkpoint",
        ),
        (3, 5, f"2 steps since {tmp_path}/iter_0000003 are not saved; {again} continues from that"),
    ):
        trainer = make_trainer()
        interrupted(trainer, tmp_path, interval, at)
        found = describe_saved_progress(trainer, CheckpointConfig(save=str(tmp_path)), start)
        assert found.startswith(expected), (interval, at)


def test_an_interrupted_run_names_the_checkpoint_that_it_continued_from(make_trainer, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "run"
    saver = Saver(CheckpointStore(base), {}, None, None, None, Console(silent=True))
    make_trainer(callbacks=[saver, StopAt(2, None)]).run()
    path, remedy = base / "iter_0000002", "the same command continues from that checkpoint"
    for interval, at, expected in (
        (None, 2, f"no step was completed since {path}; the same command continues from it"),
        (None, 3, f"1 step since {path} is not saved; {remedy}"),
        (None, 6, f"4 steps since {path} are not saved; {remedy}"),
        (5, 5, f"saved in {folder}/iter_0000005; the same command with --load {folder} contin"),
        (5, 7, f"2 steps since {folder}/iter_0000005 are not saved; the same command with --lo"),
    ):
        trainer = make_trainer()
        continued = restore(trainer, base, {}, Console(silent=True))
        assert continued == SavedCheckpoint(path, 2)
        found = interrupted(trainer, folder, interval, at, continued)
        assert found.startswith(expected), (interval, at)


def test_a_signal_during_the_exchange_of_requests_stops_all_ranks_after_the_next_step(
    make_trainer, monkeypatch
):
    trainer, requests = make_trainer(), []
    mesh = SimpleNamespace(
        axis=lambda name: SimpleNamespace(size=2), device=torch.device("cpu"), is_imagined=False
    )
    trainer.engine = SimpleNamespace(
        mesh=mesh, stages=SimpleNamespace(wait_for_parameters=lambda: None)
    )
    trainer.step = lambda steps: setattr(trainer, "iteration", trainer.iteration + 1)
    trainer.train_iters, trainer.callbacks = 10, []

    def all_reduce(request, world, **options):
        """Returns the request of this rank, as if the other rank had none."""
        requests.append(int(request))
        if len(requests) == 3:
            trainer.stop(Stop("SIGINT", 130))  # after the request of this rank was sent
        return request

    monkeypatch.setattr("megatron_train.trainer.all_reduce", all_reduce)
    assert trainer.run() == Stop("SIGINT", 130)
    assert (requests, trainer.iteration) == ([-1, -1, -1, 130], 4)


def test_a_saved_trainer_continues_and_another_model_is_refused(make_trainer, tmp_path, capsys):
    console = Console()
    store, order = CheckpointStore(tmp_path), {"seed": {"seed": 1}}

    def saver(interval):
        return Saver(store, order, None, interval, 2, console)

    make_trainer(callbacks=[saver(2)], train_iters=7).run()
    assert [store.path(n).exists() for n in (2, 4, 6, 7)] == [False, False, True, True]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"saved checkpoint {store.path(n)}" for n in (2, 4, 6, 7)]
    assert not restore(make_trainer(), tmp_path / "nowhere", order, console)

    second = make_trainer(callbacks=[saver(None)])
    assert restore(second, tmp_path, order, console)
    assert (second.iteration, second.consumed_samples) == (7, 42)
    second.run()
    whole = make_trainer()
    whole.run()
    table = [trainer.task.stages[0].weight for trainer in (second, whole)]
    assert torch.equal(*table)

    with pytest.raises(TrainError, match="with --seed 1, but this run has --seed 2; give the"):
        restore(make_trainer(), tmp_path / "iter_0000007", {"seed": {"seed": 2}}, console)
    assert restore(
        make_trainer(),
        tmp_path / "iter_0000007",
        {"seed": {"seed": 2}},
        console,
        allowed_changes=["seed"],
    )
    assert "seed 1 in the checkpoint and 2 in this run" in capsys.readouterr().err
    other = make_trainer()
    other.task.model_record = ModelRecord("bigram", None, 0, {"vocabulary": 12})
    with pytest.raises(TrainError, match="vocabulary 11 in the checkpoint and 12 in this run"):
        restore(other, tmp_path, order, console)


def test_compile_on_several_ranks_needs_torch_2_13():
    require_whole_compiler(SimpleNamespace(world_size=1), "2.11.0")
    require_whole_compiler(SimpleNamespace(world_size=2), "2.13.0+cpu")
    with pytest.raises(TrainError, match=r"^--compile on 2 ranks needs torch 2\.13 .* 2\.12\.1 "):
        require_whole_compiler(SimpleNamespace(world_size=2), "2.12.1")
