import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_ckpt import CheckpointError, CheckpointStore, Retention, View
from megatron_ckpt.store import transaction

STATE = {"w": [View.whole(torch.ones(2))]}
RULES = st.builds(Retention, st.none() | st.integers(1, 5), st.none() | st.integers(1, 7))


@given(RULES, st.sets(st.integers(0, 40)))
def test_the_newest_and_every_nth_checkpoint_are_kept(rule, iterations):
    gone = set(rule.to_delete(iterations))
    kept = iterations - gone
    assert gone <= iterations
    if iterations:
        assert max(iterations) in kept
    if rule.latest is None:
        assert not gone
    else:
        newest = set(sorted(iterations)[-rule.latest :])
        assert newest <= kept
        every = {n for n in iterations if rule.every and n % rule.every == 0}
        assert kept == newest | every


def test_old_checkpoints_are_deleted_and_other_folders_are_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "iter_0000001").mkdir()  # possibly being copied here
    (tmp_path / "notes").mkdir()
    for iteration in range(10, 80, 10):
        store.save(iteration, STATE, retention=Retention(latest=2, every=30))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "iter_0000001",
        "iter_0000030",
        "iter_0000060",
        "iter_0000070",
        "notes",
    ]


def test_the_saved_checkpoint_is_kept_if_newer_ones_exist(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(50, STATE)
    store.save(20, STATE, retention=Retention(latest=1))
    assert store.path(20).exists() and store.path(50).exists()


def test_a_rule_that_keeps_all_reads_no_checkpoint(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(transaction, "scan_directories", lambda folder: read.append(folder) or [])
    for number, rule in enumerate((None, Retention(), Retention(every=2), Retention(latest=2))):
        CheckpointStore(tmp_path).save(number, STATE, retention=rule)
        assert read == ([tmp_path] if number == 3 else [])


def test_rules_that_would_remove_everything_are_refused():
    with pytest.raises(CheckpointError, match="latest=0"):
        Retention(latest=0)
    with pytest.raises(CheckpointError, match="every=-1"):
        Retention(every=-1)
