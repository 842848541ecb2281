"""A folder with only damaged checkpoints is not treated as an empty folder."""

from types import SimpleNamespace

import pytest
from megatron_ckpt import CheckpointStore, CorruptCheckpointError, SingleProcessCoordinator
from megatron_train import starting_point
from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.starting_point import StartingPoint


@pytest.mark.parametrize(
    "settings",
    [
        {"save": "run"},
        {"load": "run"},
        {"save": "run", "load": "run"},
        {"load": "run", "finetune": True},
        {"pretrained_checkpoint": "run"},
        {"save": "run", "pretrained_checkpoint": "other"},
    ],
)
def test_no_new_run_begins_over_damaged_checkpoints(tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    CheckpointStore("other").save(1, {"trainer": {}})
    for iteration in (2, 4):
        folder = CheckpointStore("run").save(iteration, {"trainer": {}})
        manifest = folder / "MANIFEST.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpointError, match="run has damaged checkpoints and no complete"):
        StartingPoint.find(CheckpointConfig(**settings), SingleProcessCoordinator())


def test_incomplete_checkpoints_are_skipped(tmp_path):
    (tmp_path / "iter_0000002.tmp-0a").mkdir()
    config = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    assert StartingPoint.find(config, SingleProcessCoordinator()).folder == tmp_path


@pytest.mark.parametrize(
    "state",
    [5, {"callbacks": 5}, {"callbacks": {"saver": 5}}, {"callbacks": {"saver": {"origin": 5}}}],
)
def test_a_damaged_state_in_the_folder_is_refused_in_one_line(tmp_path, state):
    CheckpointStore(tmp_path / "other").save(1, {"trainer": {}})
    CheckpointStore(tmp_path / "run").save(1, {"trainer": state})
    config = CheckpointConfig(
        save=str(tmp_path / "run"), pretrained_checkpoint=str(tmp_path / "other")
    )
    with pytest.raises(
        TrainError, match=r"iter_0000001: the saved state is damaged: .* is 5; give"
    ):
        StartingPoint.find(config, SingleProcessCoordinator())


def test_a_run_begun_with_weights_may_continue_with_another_seed_and_data(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(starting_point, "restore", lambda *_, **more: seen.append(more))
    checkpoint = CheckpointConfig(
        pretrained_checkpoint="other",
        save=str(tmp_path),
        no_load_rng=True,
        allow_changed_run=("data",),
    )
    config = SimpleNamespace(checkpoint=checkpoint)
    start = StartingPoint(tmp_path, origin="other", note="is continued")
    start.load(None, config, {}, Console(silent=True))
    loads = {"load_optimizer": True, "schedules": "unchanged"}
    assert seen == [{**loads, "allowed_changes": {"data", "seed"}}]
