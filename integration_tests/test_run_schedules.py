"""Schedules of runs that continue, listed steps, and refusals of schedules that cannot be."""

from pathlib import Path

import pytest
from megatron_train.cli import main
from megatron_train.metrics.records import read_records

RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8
    --micro-batch-size 2 --train-iters 6 --mock-data --tokenizer-type NullTokenizer --vocab-size 40
    --eval-iters 0 --log-interval 6 --device cpu --no-progress"""
SHAPE = """--lr 1e-2 --min-lr 1e-3 --lr-decay-style polynomial --lr-decay-power 2
    --lr-warmup-iters 2 --start-weight-decay 0.1 --end-weight-decay 0.5
    --weight-decay-incr-style linear --decoupled-lr 5e-3"""


@pytest.fixture
def train(tmp_path, monkeypatch, capsys, plain_runs):
    monkeypatch.chdir(tmp_path)

    def run(words, status=0):
        capsys.readouterr()
        assert main(f"pretrain gpt {RUN} {words}".split()) == status
        return capsys.readouterr()

    return run


def records(folder):
    kept = ("iteration", "consumed_samples", "lm loss", "grad_norm", "learning_rate")
    found = read_records(Path(folder, "metrics.jsonl"))
    return [tuple(record[name] for name in kept) for record in found.train]


def test_a_run_continues_with_the_schedules_of_its_checkpoint_if_asked(train):
    train(f"{SHAPE} --save whole")
    train(f"{SHAPE} --save stopped --exit-interval 2")
    other = "--lr 3e-2 --lr-decay-style cosine --weight-decay 0.3 --save stopped --load stopped"
    warned = train(f"{other} --exit-interval 4 --use-checkpoint-opt-param-scheduler").err
    assert "settings of the optimizer differ" not in warned
    train(f"{other} --use-checkpoint-opt-param-scheduler")
    assert records("stopped") == records("whole") and len(records("whole")) == 6


def test_a_run_that_leaves_the_schedules_of_an_earlier_run_is_warned(train):
    """Its settings are those of the checkpoint, whose schedules are not."""
    train(f"{SHAPE} --save stopped --exit-interval 2")
    other = "--lr 3e-2 --lr-decay-style cosine --weight-decay 0.3 --save stopped --load stopped"
    train(f"{other} --exit-interval 4 --use-checkpoint-opt-param-scheduler")
    warned = train(f"{other} --override-opt-param-scheduler").err
    assert "warning: schedules differ from those before step 4, which the run had from an" in warned
    assert "learning rate: max_lr 0.01, now 0.03; " in warned
    assert "; --use-checkpoint-opt-param-scheduler continues with them" in warned
    assert "settings of the optimizer differ" not in warned


def test_without_the_flag_the_new_schedules_apply_with_a_warning(train):
    train(f"{SHAPE} --save stopped --exit-interval 2")
    other = "--lr 3e-2 --lr-decay-style constant --save stopped --load stopped"
    assert "--override-opt-param-scheduler to jump to the new one" in train(other, 1).err
    said = train(f"{other} --override-opt-param-scheduler")
    assert "lr 0.01 in the checkpoint and 0.03 in this run" in said.err + said.out
    assert [record[-1] for record in records("stopped")[2:]] == [3e-2] * 4


def test_listed_steps_are_skipped_once_and_after_a_restart_too(train):
    lines = train(f"{SHAPE} --save whole --iterations-to-skip 3 4").out
    assert "step 3 is in --iterations-to-skip: 2 samples are not trained on" in lines
    train(f"{SHAPE} --save stopped --iterations-to-skip 3 4 --exit-interval 2")
    train(f"{SHAPE} --save stopped --load stopped --iterations-to-skip 3 4")
    assert records("stopped") == records("whole")
    assert [record[:2] for record in records("whole")] == [(1, 2), (2, 4), (5, 10), (6, 12)]
    events = read_records(Path("whole", "metrics.jsonl")).events
    assert [event["iteration"] for event in events if event["event"] == "skip"] == [3, 4]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--lr-warmup-iters 6", "--lr-warmup-iters 6 must be below --train-iters 6"),
        ("--lr-decay-iters 3 --lr-warmup-iters 4", "--lr-warmup-iters 4 must be below --lr-decay"),
        ("--lr-decay-power 2", "--lr-decay-power 2.0 has no effect with --lr-decay-style linear"),
        ("--lr-decay-style polynomial --lr-decay-power 0", "--lr-decay-power must be positive"),
        ("--iterations-to-skip 0", "--iterations-to-skip: steps count from 1, got 0"),
        ("--iterations-to-skip 2 9", "--iterations-to-skip 9 is beyond the last step 6"),
        ("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler needs --lo"),
        ("--lr-mult bias", "--lr-mult: 'bias' is not PATTERN=FACTOR"),
        ("--weight-decay-mult nothing=1", "--weight-decay-mult: no parameter matches 'nothing'"),
        ("--linear-product lora --lr-mult nothing=1", "--lr-mult: no parameter matches 'nothing'"),
        ("--apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm: no parameter matches '*.q_"),
        ("--optimizer sgd --lion-beta1 0.5", "--lion-beta1 is a setting of the update rule lion"),
        ("--optimizer lion --lion-beta2 1", "--lion-beta2 must lie in [0, 1), got 1.0"),
    ],
)
def test_an_impossible_schedule_or_group_is_one_line(train, words, line):
    error = train(f"--lr 1e-2 {words}", 1).err.strip()
    assert error.startswith(f"megatron-train: error: {line}") and "\n" not in error
