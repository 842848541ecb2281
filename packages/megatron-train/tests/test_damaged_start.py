"""A folder whose checkpoints are all damaged is no folder without checkpoints."""

import pytest
from megatron_ckpt import CheckpointStore, CorruptCheckpointError, SingleProcess
from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.starting import Start


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
def test_no_run_begins_anew_over_damaged_checkpoints(tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    CheckpointStore("other").save(1, {"trainer": {}})
    for iteration in (2, 4):
        folder = CheckpointStore("run").save(iteration, {"trainer": {}})
        manifest = folder / "MANIFEST.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpointError, match="run has damaged checkpoints and no whole"):
        Start.find(CheckpointConfig(**settings), SingleProcess())


def test_what_was_never_completed_is_passed_over(tmp_path):
    (tmp_path / "iter_0000002.tmp-0a").mkdir()
    config = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    assert Start.find(config, SingleProcess()).folder == tmp_path
