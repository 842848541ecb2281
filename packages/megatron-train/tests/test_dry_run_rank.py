"""Dry runs of a rank with a trainer that only counts, and the processes in which ranks run."""

import os
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron_parallel import ParallelLayout
from megatron_train.dry_run import dry_run as dry_run_module
from megatron_train.dry_run import rank as rank_module
from megatron_train.dry_run.dry_run import dry_run
from megatron_train.dry_run.rank import SameBatches, imagine_rank
from megatron_train.dry_run.repetition import Repetition, find_repetition

from .test_dry_run import resolved


def test_equal_micro_batches_are_for_training_alone():
    batches = SameBatches("batch", [2, 3])
    assert list(batches.training(0)) == [["batch"] * 2, ["batch"] * 3]
    assert list(batches.validation()) == list(batches.testing()) == []
    assert not batches.has_test and batches.no_test_reason == ""


class Ledger:
    """Counts of a device without operations."""

    def __init__(self):
        self.storages = SimpleNamespace(
            part=lambda name: nullcontext(),
            by_part=lambda: {"parameters": self.storages.peak - 1},
            at_peak=lambda: {("parameters", "a.py:1"): self.storages.peak},
        )
        self.clear()

    def clear(self):
        for name in ("waits", "blocking_copies", "copies", "kernels", "bytes_moved"):
            setattr(self, name, Counter())
        self.flops, self.storages.peak = 0, 0


class Trainer:
    """Uses 10 kernels, 100 operations and 4 bytes of messages for each micro-batch.

    The first step with a new number of micro-batches has three kernels more.
    """

    def __init__(self, mesh, ledger, sizes):
        self.mesh, self.ledger, self.sizes = mesh, ledger, sizes
        ledger.kernels["build"] += 1
        self.callbacks = []

    def run(self):
        (callback,) = self.callbacks
        callback.on_start(self)
        seen = set()
        for size in self.sizes:
            self.ledger.kernels["mm"] += 10 * size + 3 * (size not in seen)
            self.ledger.flops += 100 * size
            self.ledger.storages.peak = 1000 - size
            self.mesh.axis("pp").count("send", torch.ones(size))
            seen.add(size)
            callback.on_step(self, None)


@pytest.mark.parametrize("memory_only", [None, False, True])
def test_a_whole_step_follows_from_a_short_and_a_longer_one(memory_only, monkeypatch):
    ledger, ran = Ledger(), []

    @contextmanager
    def device(_):
        yield ledger

    def trainer(run, mesh, batch, sizes):
        ran.append(sizes)
        return Trainer(mesh, ledger, sizes)

    monkeypatch.setattr(rank_module, "imagined_device", device)
    monkeypatch.setattr(rank_module, "imagine_trainer", trainer)
    monkeypatch.setattr(rank_module, "proof_batch", lambda run: None)
    monkeypatch.setattr(rank_module, "_label", lambda *_: None)
    monkeypatch.setattr(rank_module, "find_repetition", lambda *_: Repetition(20, 6, 2, 2))
    layout = ParallelLayout(pp=2, vpp=2, dp=1)
    run = SimpleNamespace(layout=layout, layer_split=[range(n, n + 1 + n) for n in range(4)])
    options = {} if memory_only is None else {"memory_only": memory_only}
    found = imagine_rank(run, 1, torch.device("cpu"), **options)
    assert (found.rank, found.pipeline_rank, found.stages, found.layers) == (1, 1, (1, 3), 2 + 4)
    assert (found.micro_batches, found.run_micro_batches) == (20, 6)
    assert (found.peak, found.memory) == (994, {"parameters": 993})
    assert found.at_peak == {("parameters", "a.py:1"): 994}
    assert 0.0 <= found.seconds < 600.0
    counts = found.counts
    if memory_only:
        assert ran == [(6,)]
        assert (counts.kernels, counts.flops) == ({"mm": 63}, 600)
        assert counts.message_bytes == {("pp", "send"): 4 * 6}
        return
    assert ran == [(6, 2, 2, 4, 4)]
    assert (counts.kernels, counts.flops) == ({"mm": 10 * 20}, 100 * 20)
    assert counts.messages == {("pp", "send"): 1}
    assert counts.message_bytes == {("pp", "send"): 4 * 20}


def test_ranks_run_in_this_process_unless_several_are_asked_for(monkeypatch):
    def imagine(run, rank, device, *, memory_only):
        return os.getpid(), rank, device.type, memory_only

    monkeypatch.setattr(dry_run_module, "imagine_rank", imagine)
    run, own = SimpleNamespace(layout=ParallelLayout(pp=3, dp=2)), os.getpid()
    here = [(own, 0, "cpu", False), (own, 4, "cpu", False)]
    assert dry_run(run, "cpu", [0, 2]) == dry_run(run, "cpu", [0, 2], processes=1) == here
    forked = dry_run(run, "cpu", [0, 2], processes=2, memory_only=True)
    assert [rest for _, *rest in forked] == [[0, "cpu", True], [4, "cpu", True]]
    assert own not in {process for process, *_ in forked}


def test_a_step_with_a_last_round_of_its_own_repeats_after_it():
    """18 micro-batches are 4 rounds of 4, and 2; the shortest such step has 4 + 2."""
    run = resolved(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 18 --microbatch-group-size-per-virtual-pipeline-stage 4"
    )
    assert find_repetition(run, 0) == Repetition(18, 10, 6, 4)
