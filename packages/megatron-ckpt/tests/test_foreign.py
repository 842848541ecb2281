"""Detection of checkpoints of other programs."""

import pytest
from megatron_ckpt import (
    CheckpointError,
    CheckpointStore,
    describe_foreign_checkpoint,
    find_checkpoint,
)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "megatron" / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "dist" / "iter_0000010").mkdir(parents=True)
    (tmp_path / "dist" / "iter_0000010" / "common.pt").touch()
    (tmp_path / "weights.gguf").touch()
    (tmp_path / "text.bin").touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("hf", "is a Hugging Face folder; import it"),
        ("megatron", "holds checkpoints of Megatron-LM"),
        ("dist", "holds checkpoints of Megatron-LM"),
        ("weights.gguf", "is a GGUF file; import it"),
        ("text.bin", "is a file; use a folder"),
    ],
)
def test_foreign_checkpoints_are_described_with_a_remedy(place, name, what):
    assert describe_foreign_checkpoint(place / name).startswith(what)
    with pytest.raises(CheckpointError, match=f"{name} {what}"):
        find_checkpoint(place / name)


def test_empty_torn_and_own_folders_are_not_foreign(place):
    (place / "torn" / "iter_0000010").mkdir(parents=True)
    CheckpointStore(place / "ours").save(3, {"samples": 1})
    for name in ("empty", "nowhere", "torn", "ours"):
        assert describe_foreign_checkpoint(place / name) is None


def test_files_beside_a_complete_checkpoint_do_not_matter(place):
    CheckpointStore(place / "hf").save(3, {"samples": 1})
    assert find_checkpoint(place / "hf").iteration == 3
