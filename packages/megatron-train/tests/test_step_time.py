"""Steps of more than a day are refused before anything is built; FLOPs are counted by hand."""

from dataclasses import replace

import pytest
import torch
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_parallel import ParallelLayout
from megatron_train import pretrain, step_time
from megatron_train.cli.main import main
from megatron_train.config.data import DataConfig
from megatron_train.config.run import RunConfig
from megatron_train.config.sections import EvaluationConfig, TrainingConfig
from megatron_train.errors import TrainError
from megatron_train.metrics.peak import Peak, assumed_cpu_peak
from megatron_train.step_time import check_step_time, minimum_work

# Elements of the matrices that multiply a token: in each of 4 layers, 4 x 32 x 32 of attention
# and 2 x 32 x 128 of the feed-forward layer, and 32 x 128 of the output layer.
MATRICES = 4 * (4 * 32 * 32 + 2 * 32 * 128) + 32 * 128


def run_of(length=64, layout=None, **data):
    model = GPTConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=length,
    )
    return RunConfig(
        model=model,
        data=DataConfig(seq_length=length, data_path=("text",), **data),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=1),
        optimizer=OptimizerConfig(lr=0.1),
        layout=layout or ParallelLayout(dp=1),
        evaluation=EvaluationConfig(eval_iters=0),
    )


def operations(samples, length, attention=True):
    """Returns the FLOPs of 3 passes, 2 for each multiply-add; attention has half of all pairs."""
    pairs = length * length // 2 if attention else 0
    return 3 * 2 * samples * (length * MATRICES + 4 * 2 * 32 * pairs)


def test_the_work_of_a_step_is_divided_over_all_ranks():
    work = minimum_work(run_of())
    assert work.flops == operations(8, 64)
    assert work.attention == pytest.approx(4 * 32 * 64 / (MATRICES + 4 * 32 * 64))
    shared = minimum_work(run_of(layout=ParallelLayout(dp=2, tp=2)))
    assert shared == replace(work, flops=work.flops / 4)
    packed = minimum_work(run_of(reset_attention_mask=True, tokenizer_model="tokenizer"))
    assert (packed.flops, packed.attention) == (operations(8, 64, attention=False), 0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"global_batch_size": 8, "rampup_batch_size": (2, 2, 60)},
        {"step_batch_size_schedule": ("0:8 640:2",)},
    ],
)
def test_the_largest_step_of_a_run_is_checked(sizes):
    training = TrainingConfig(micro_batch_size=2, train_samples=100, **sizes)
    assert minimum_work(replace(run_of(), training=training)).flops == operations(8, 64)


def test_a_long_step_is_a_warning_and_one_of_more_than_a_day_an_error():
    run = run_of()

    def check(seconds):
        return check_step_time(run, Peak(operations(8, 64) / seconds, "a table"))

    assert check(60) is None and check(60.5) is not None
    assert check_step_time(run, None) is None
    line = check(90)
    assert line.startswith("a step of 8 samples with --seq-length 64 takes at least 1.5 minutes: ")
    assert f"{operations(8, 64):.4g} floating-point operations on each rank, 13 % of them" in line
    assert "(a table); nothing is printed" in line
    assert "takes at least 24.0 hours" in check(24 * 3600)
    assert "takes at least 119.9 minutes" in check(7194)
    assert "takes at least 120.0 minutes" in check(7199)
    assert "takes at least 2.0 hours" in check(7200 + 1e-3)
    for seconds, shown in ((86401, "24.0 hours"), (172799, "48.0 hours"), (172801, "2.0 days")):
        with pytest.raises(TrainError, match=f"at least {shown}: .*; the maximum is 24.0 hours: "):
            check(seconds)
    with pytest.raises(TrainError, match=r"at least 2\.5 days: .*: lower --global-batch-size or "):
        check(60 * 3600)


def test_a_sequence_that_fits_into_memory_is_refused_if_its_attention_takes_years():
    rate = Peak(2e11, "assumed")
    days = operations(8, 4_000_000) / 2e11 / 86400
    message = f"--seq-length 4000000 takes at least {days:.1f} days: .* 100 % of them attention"
    with pytest.raises(TrainError, match=rf"{message}, .*: lower --seq-length or "):
        check_step_time(run_of(4_000_000), rate)


def test_the_assumed_peak_of_a_cpu_is_proportional_to_its_threads():
    threads = torch.get_num_threads()
    assert assumed_cpu_peak(torch.float32).flops_per_second == threads * 1e11
    assert assumed_cpu_peak(torch.bfloat16).flops_per_second == threads * 1e12


FLAGS = (
    "pretrain gpt --num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 100 "
    "--micro-batch-size 1 --train-iters 1 --lr 0.1 --eval-iters 0 --device cpu"
)


@pytest.mark.parametrize("data", ["--mock-data", "--data-path absent_text_document"])
def test_step_time_is_checked_before_data_is_opened(data, capsys, monkeypatch):
    monkeypatch.setattr(pretrain, "open_batches", None)
    monkeypatch.setattr("megatron_train.memory_check.device_memory", lambda device: None)
    assert main(f"{FLAGS} --seq-length 40000000 {data}".split()) == 1
    out, error = capsys.readouterr()
    assert error.startswith("megatron-train: error: a step of 1 sample with --seq-length 40000000")
    assert error.count("\n") == 1 and out == ""


def test_a_long_step_is_a_warning_and_training_continues(capsys, monkeypatch):
    monkeypatch.setattr(step_time, "WARN_STEP_SECONDS", 0.0)
    assert main(f"{FLAGS} --seq-length 8 --mock-data".split()) == 0
    error = capsys.readouterr().err
    assert error.startswith("megatron-train: warning: a step of 1 sample with --seq-length 8 takes")
