"""Where a run starts: with which checkpoint, what it prints about it, and its output folders."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_ckpt import CheckpointStore, SingleProcessCoordinator
from megatron_train import starting_point
from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.starting_point import StartingPoint, check_output_folders, lock_save_folder


def find(**settings):
    return StartingPoint.find(CheckpointConfig(**settings), SingleProcessCoordinator())


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Makes the runs ``base``, ``other`` and ``tuned``, which began with the weights of base."""
    monkeypatch.chdir(tmp_path)
    CheckpointStore("base").save(7, {"trainer": {}})
    CheckpointStore("other").save(8, {"trainer": {}})
    origin = {"callbacks": {"saver": {"origin": str(tmp_path / "base")}}}
    CheckpointStore("tuned").save(9, {"trainer": origin})


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("settings", "folder", "begins"),
    [
        ({}, None, False),
        ({"save": "new"}, None, False),
        ({"load": "base"}, "base", False),
        ({"load": "nowhere"}, "nowhere", False),
        ({"load": "base", "exit_on_missing_checkpoint": True}, "base", False),
        ({"load": "base/iter_0000007"}, "base/iter_0000007", False),
        (
            {"load": "base/iter_0000007", "exit_on_missing_checkpoint": True},
            "base/iter_0000007",
            False,
        ),
        ({"load": "base", "save": "new"}, "base", False),
        ({"load": "base", "save": "./base"}, "base", False),
        ({"load": "base", "finetune": True}, "base", True),
        ({"pretrained_checkpoint": "base"}, "base", True),
        ({"pretrained_checkpoint": "base", "load": "nowhere"}, "base", True),
        ({"pretrained_checkpoint": "base", "load": "other"}, "other", False),
        ({"pretrained_checkpoint": "base", "load": "other", "finetune": True}, "other", True),
        ({"pretrained_checkpoint": "base", "load": "nowhere", "finetune": True}, "base", True),
        ({"pretrained_checkpoint": "base", "save": "tuned"}, "tuned", False),
        ({"load": "base", "finetune": True, "save": "tuned"}, "tuned", False),
    ],
)
def test_a_run_starts_with_one_of_its_folders(settings, folder, begins):
    found = find(**settings)
    assert found.folder == (None if folder is None else Path(folder))
    assert found.weights_only == begins
    continued = settings.get("save") == "tuned"
    assert found.origin == (
        str((Path("base" if continued else folder)).resolve()) if begins or continued else ""
    )
    assert bool(found.note) == continued
    if continued:
        assert found.note == (
            "--save tuned has this run at step 9: continuing it instead of beginning again with "
            "the weights of base"
        )


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save": "base"}, "base already has a run, at step 7; add --load base to continue it"),
        ({"save": "base", "load": "other"}, "--save base already has a run, at step 7; add"),
        ({"save": "base", "load": "nowhere"}, "--save base already has a run, at step 7; add"),
        (
            {"save": "tuned", "pretrained_checkpoint": "other"},
            "tuned already has a run, at step 9, that did not begin with the weights of other",
        ),
        ({"save": "base", "pretrained_checkpoint": "other"}, "did not begin with the weights of"),
        (
            {"load": "nowhere", "exit_on_missing_checkpoint": True},
            "--load nowhere has no complete checkpoint; give a folder that has one",
        ),
        ({"load": "nowhere", "finetune": True}, "--load nowhere has no complete checkpoint to"),
        (
            {"pretrained_checkpoint": "nowhere"},
            "--pretrained-checkpoint nowhere has no complete checkpoint to load weights from",
        ),
        (
            {"pretrained_checkpoint": "nowhere", "load": "nowhere", "finetune": True},
            "--pretrained-checkpoint nowhere has no complete checkpoint to load weights from",
        ),
    ],
)
def test_a_run_without_such_a_folder_is_refused(settings, message):
    with pytest.raises(TrainError, match=message):
        find(**settings)


@pytest.fixture
def start(monkeypatch, capsys):
    """Returns a function that starts a run; gives what it loads, prints and warns about."""
    loads = []

    def restore(trainer, *given, **more):
        loads.append(("continues", more["load_optimizer"], more["allowed_changes"]))
        return trainer.found

    def load_weights(trainer, *given):
        loads.append("weights")
        return 7, trainer.new

    monkeypatch.setattr(starting_point, "restore", restore)
    monkeypatch.setattr(starting_point, "load_weights", load_weights)

    def run(point, *, step=3, found="a checkpoint", new=(), **checkpoint):
        loads.clear()
        out = io.StringIO()
        trainer = SimpleNamespace(
            iteration=step, consumed_samples=5 * step, train_iters=1, found=found, new=new
        )
        config = SimpleNamespace(
            checkpoint=CheckpointConfig(**checkpoint),
            train_iters_after=lambda steps, samples: 4 + steps - samples // 5,
        )
        result = point.load(trainer, config, {}, Console(out))
        assert result == (found if point.folder and not point.weights_only else None)
        if result:
            assert trainer.train_iters == 4
        return list(loads), out.getvalue(), capsys.readouterr().err

    return run


BASE = Path("base")
CONTINUES = ("continues", True, set())
LINE = "continuing from base after step 3\n"


def test_a_run_prints_where_it_starts(start):
    assert start(StartingPoint()) == ([], "", "")
    begins = (
        "beginning at step 0 with the weights of base, step 7; optimizer state and order of "
        "samples are new\n"
    )
    point = StartingPoint(BASE, weights_only=True)
    assert start(point, load="base", finetune=True) == (["weights"], begins, "")
    more = "parameters of heads that are new, from --seed: a.bias, a.weight\n"
    assert start(point, new=["a.bias", "a.weight"])[1] == begins + more
    assert start(StartingPoint(BASE), load="base") == ([CONTINUES], LINE, "")
    noted = StartingPoint(BASE, note="is continued")
    assert start(noted, save="base")[1] == f"is continued\n{LINE}"


@pytest.mark.parametrize(("step", "done"), [(3, False), (4, True), (5, True)])
def test_a_run_that_has_all_its_steps_says_so(start, step, done):
    printed = start(StartingPoint(BASE), step=step, load="base")[1]
    line = "nothing left to do: the run has 4 steps\n"
    assert printed == f"continuing from base after step {step}\n{line if done else ''}"


def test_an_optimizer_is_new_only_if_the_folder_is_that_of_load(start):
    own, renewed = StartingPoint(BASE), {"load": "base", "no_load_optim": True}
    assert start(own, **renewed)[0] == [("continues", False, set())]
    assert start(own, load="base")[0] == [CONTINUES]
    assert start(StartingPoint(BASE, note="continued"), **renewed)[0] == [CONTINUES]
    changed = {"load": "base", "allow_changed_run": ("data",)}
    assert start(own, **changed)[0] == [("continues", True, {"data"})]
    assert start(own, load="base", no_load_rng=True)[0] == [("continues", True, {"seed"})]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"load": "base", "save": "./base"}, False),  # a command that is given again
        ({"load": "base", "save": "other"}, True),
        ({"load": "base"}, True),
    ],
)
def test_a_folder_without_a_checkpoint_is_reported(start, settings, warns):
    _, out, err = start(StartingPoint(BASE), found=None, **settings)
    line = "no complete checkpoint in base: starting a new run"
    warning = f"megatron-train: warning: {line}; use --exit-on-missing-checkpoint to fail instead\n"
    assert (out, err) == (("", warning) if warns else (f"{line}\n", ""))


FLAGS = ("save", "tensorboard-dir", "data-cache-path", "object-storage-cache-path")


def outputs(**folders):
    """Returns a stand-in for a run with these output folders."""
    names = {flag.replace("-", "_"): None for flag in FLAGS} | folders
    part = SimpleNamespace(**names)
    return SimpleNamespace(checkpoint=part, logging=part, data=part)


@pytest.mark.parametrize("flag", FLAGS)
def test_output_folders_must_not_be_files(tmp_path, flag):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    name = flag.replace("-", "_")
    for folder in (tmp_path / "folder", tmp_path / "folder" / "a" / "b", "s3://file", None):
        check_output_folders(outputs(**{name: folder and str(folder)}))
    for folder in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(TrainError) as caught:
            check_output_folders(outputs(**{name: str(folder)}))
        assert str(caught.value) == (
            f"--{flag} {folder}: {tmp_path / 'file'} is a file, not a folder; give another name"
        )


def test_a_folder_is_locked_while_a_run_saves_into_it(tmp_path):
    ours, alone = CheckpointConfig(save=str(tmp_path / "run")), SingleProcessCoordinator()
    with lock_save_folder(CheckpointConfig(), alone, "first"):
        pass
    for _ in range(2):  # the lock ends with the block
        with lock_save_folder(ours, alone, "megatron-train first"):
            refused = pytest.raises(TrainError, match=r"run is in use by another run \(.*n first")
            with refused, lock_save_folder(ours, alone, "second"):
                pass
            with lock_save_folder(CheckpointConfig(save=str(tmp_path / "b")), alone, "third"):
                pass
