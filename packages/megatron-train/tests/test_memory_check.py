"""Runs that need more than the memory of the device are refused before they are built."""

import os
from dataclasses import replace

import pytest
import torch
from megatron_models import GPTConfig, training_memory
from megatron_models.fused_operations import FUSED, SEPARATE
from megatron_optim import OptimizerConfig
from megatron_parallel import ParallelLayout
from megatron_train import memory_check
from megatron_train.config.data import DataConfig
from megatron_train.config.placement import PlacementConfig
from megatron_train.config.run import RunConfig
from megatron_train.config.sections import EvaluationConfig, TrainingConfig
from megatron_train.errors import TrainError
from megatron_train.memory_check import (
    check_memory,
    device_memory,
    minimum_memory,
    minimum_score_memory,
)

CPU = torch.device("cpu")
GIB = 2**30


def run_of(length=64, layout=None, **training):
    model = GPTConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=length,
    )
    return RunConfig(
        model=model,
        data=DataConfig(seq_length=length, data_path=("text",)),
        training=TrainingConfig(
            **{"micro_batch_size": 2, "train_iters": 1, "attention_dropout": 0.0, **training}
        ),
        optimizer=OptimizerConfig(lr=0.1),
        layout=layout or ParallelLayout(dp=1),
        evaluation=EvaluationConfig(eval_iters=0),
    )


def test_a_run_is_refused_if_one_byte_does_not_fit(monkeypatch):
    run = run_of()
    needed = training_memory(run.model, 64, 2)
    monkeypatch.setattr(memory_check, "device_memory", lambda device: needed.total)
    check_memory(run, CPU)
    monkeypatch.setattr(memory_check, "device_memory", lambda device: needed.total - 1)
    with pytest.raises(TrainError, match=r"--seq-length 64 .*-size 2 needs at least"):
        check_memory(run, CPU)
    monkeypatch.setattr(memory_check, "device_memory", lambda device: None)
    check_memory(run, CPU)


def test_a_sequence_that_exceeds_this_hosts_memory_is_refused():
    with pytest.raises(TrainError, match=r"--seq-length 400000000 .* this host has \d"):
        check_memory(run_of(400_000_000), CPU)


def test_attention_scores_count_if_unfused_attention_needs_all_of_them(monkeypatch):
    dropping = run_of(10_000, attention_dropout=0.1)
    assert minimum_score_memory(dropping) == 0
    unfused = replace(dropping, placement=PlacementConfig(attention_backend="unfused"))
    scores = 4 * 2 * 4 * 10_000**2  # fp32, samples, heads, pairs
    assert minimum_score_memory(unfused) == scores
    # Each of 4 layers saves scores, probabilities and dropped probabilities.
    saved = minimum_memory(unfused).activations - minimum_memory(dropping).activations
    assert saved == pytest.approx(4 * 3 * scores, rel=0.1)
    # Without dropout, each saves scores and probabilities.
    whole = run_of(10_000)
    without = replace(whole, placement=unfused.placement)
    saved = minimum_memory(without).activations - minimum_memory(whole).activations
    assert saved == pytest.approx(4 * 2 * scores, rel=0.1)
    assert minimum_score_memory(replace(unfused, training=run_of(compile=True).training)) == 0
    half = ParallelLayout(tp=2, cp=2, dp=1)
    assert minimum_score_memory(replace(unfused, layout=half)) == scores // 2 // 4**2
    limit = minimum_memory(unfused).total + scores
    monkeypatch.setattr(memory_check, "device_memory", lambda device: limit)
    check_memory(unfused, CPU)
    monkeypatch.setattr(memory_check, "device_memory", lambda device: limit - 1)
    with pytest.raises(
        TrainError, match=r"3\.0 GiB of the attention scores .* --attention-backend unfused"
    ):
        check_memory(unfused, CPU)


def test_saved_activations_of_compiled_code_and_layers_of_other_stages_do_not_count():
    whole = minimum_memory(run_of())
    compiled = minimum_memory(run_of(compile=True))
    assert compiled.activations < whole.activations / 8
    separate = dict.fromkeys(FUSED, SEPARATE)
    token = training_memory(run_of().model, 1, 2, backends=separate)
    assert compiled.activations == token.activations
    cut = run_of(layout=ParallelLayout(tp=2, dp=1), compile=True)  # a token cannot be cut
    parallel = replace(cut, placement=PlacementConfig(sequence_parallel=True))
    assert minimum_memory(parallel).activations == minimum_memory(cut).activations
    assert replace(compiled, activations=0) == replace(whole, activations=0)
    stage = minimum_memory(run_of(layout=ParallelLayout(pp=2, dp=1)))
    assert stage.parameters < whole.parameters and stage.activations < whole.activations
    half = minimum_memory(run_of(bf16=True))
    assert half.activations < whole.activations


def test_ranks_of_a_host_divide_its_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = device_memory(CPU)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert whole is not None and whole > physical / 100
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device_memory(CPU) == whole // 4


@pytest.mark.parametrize(
    ("meminfo", "group", "expected"),
    [
        ("MemTotal: 100 kB\nSwapTotal: 20 kB\n\nHugePages:\n", None, 120 << 10),
        ("MemTotal: 100 kB\n", "max", 100 << 10),
        ("MemTotal: 100 kB\n", str(99 << 10), 99 << 10),
        ("MemTotal: 100 kB\n", str(101 << 10), 100 << 10),
        ("SwapTotal: 20 kB\n", None, None),
        ("MemTotal: much\n", None, None),
        (None, "5", None),
    ],
)
def test_the_memory_of_a_host_is_that_of_its_files(meminfo, group, expected, tmp_path, monkeypatch):
    for name, content in (("_MEMINFO", meminfo), ("_CGROUP", group)):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        monkeypatch.setattr(memory_check, name, path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert device_memory(CPU) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    share = None if expected is None else expected // 4
    assert device_memory(CPU) == share


@pytest.mark.parametrize(
    ("device", "where"), [("cpu", "this host has"), ("cuda", "the device has")]
)
def test_a_refusal_states_what_is_needed_and_what_there_is(device, where, monkeypatch):
    run = run_of(1 << 17)
    needed = minimum_memory(run)
    monkeypatch.setattr(memory_check, "device_memory", lambda device: GIB * 3 // 2)
    with pytest.raises(TrainError) as caught:
        check_memory(run, torch.device(device))
    states = needed.total - needed.activations
    message = str(caught.value)
    assert (
        f"needs at least {needed.total / GIB:.1f} GiB on this rank "
        f"({needed.activations / GIB:.1f} GiB of activations, {states / GIB:.1f} GiB of weights, "
        f"gradients and optimizer), but {where} 1.5 GiB; lower these flags"
    ) in message
    assert "unfused" not in message and "scores" not in message


def test_the_memory_of_a_gpu_is_all_of_it(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": 12.0})
    )
    assert device_memory(torch.device("cuda")) == 12


def test_sequence_parallelism_and_several_stages_lower_the_least_memory():
    cut = run_of(layout=ParallelLayout(tp=2, dp=1))
    whole = minimum_memory(cut)
    parallel = minimum_memory(replace(cut, placement=PlacementConfig(sequence_parallel=True)))
    assert parallel.activations < whole.activations
    assert replace(parallel, activations=0) == replace(whole, activations=0)
    staged = minimum_memory(run_of(layout=ParallelLayout(pp=4, dp=1)))
    single = minimum_memory(run_of())
    # A layer, its biases and gains, the embedding of 100 tokens, padded to 128, and 64 positions.
    assert staged.parameters == 4 * (12 * 32**2 + 13 * 32 + (128 + 64) * 32)
    interleaved = minimum_memory(run_of(layout=ParallelLayout(pp=2, vpp=2, dp=1)))
    assert interleaved.parameters == staged.parameters  # the layers of its first stage alone
    assert single.parameters == 4 * (4 * (12 * 32**2 + 13 * 32) + (128 + 64) * 32 + 2 * 32)
