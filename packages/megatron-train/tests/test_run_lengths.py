"""Lengths of runs and batch sizes, in steps and in samples."""

import dataclasses

import pytest
from megatron_train.errors import TrainError

from .test_configuration import IN_SAMPLES, MINIMAL, SAMPLES, parse

IN_STEPS = f"{MINIMAL} --step-batch-size-schedule 0:2 160:8,320:4"


def test_a_stepped_batch_size_is_given_by_tokens_and_ends_at_its_last_size():
    run = parse(IN_STEPS)  # samples of 16 tokens: size 8 at sample 10, size 4 at sample 20
    assert run.batch_sizes.plateaus == ((0, 2), (10, 8), (20, 4))
    assert run.global_batch_size == 4 and run.train_iters == run.training.train_iters
    assert run.train_samples == run.consumed_samples == run.batch_sizes.consumed_by(run.train_iters)
    assert parse(f"{IN_STEPS} --global-batch-size 4") == dataclasses.replace(
        run, training=dataclasses.replace(run.training, global_batch_size=4)
    )


def test_samples_and_learning_rates_do_not_depend_on_rounding_of_the_batch_size():
    plain = parse(f"{MINIMAL} --global-batch-size 12", ranks=2)
    run = parse(f"{MINIMAL} --global-batch-size 12 --decrease-batch-size-if-needed", ranks=5)
    assert (run.batch_sizes.at(0), run.global_batch_size) == (10, 12)
    assert run.train_samples == plain.train_samples == 12 * run.train_iters
    assert run.consumed_samples == 10 * run.train_iters
    assert run.learning_rate_schedule() == plain.learning_rate_schedule()


def test_a_run_that_continues_counts_the_remaining_samples():
    run = parse(f"{IN_SAMPLES} --global-batch-size 6")
    samples = run.training.train_samples
    assert run.train_iters_after(100, samples - 13) == 102
    assert run.train_iters_after(100, samples + 5) == 100


def test_errors_about_lengths_in_samples_name_samples():
    command = MINIMAL.replace("--train-iters 10", "--train-samples 20")
    with pytest.raises(TrainError, match="--lr-warmup-samples 20 must be below --train-samples 20"):
        parse(f"{command} --lr-warmup-samples 20")


def test_schedule_lengths_are_samples():
    run = parse(
        f"{MINIMAL} --global-batch-size 8 --lr-warmup-fraction 0.25 --lr 1.0 --lr-decay-iters 20"
    )
    schedule = run.learning_rate_schedule()
    assert (schedule.warmup_samples, schedule.decay_samples) == (40, 160)
    assert schedule.at(40) == 1.0 and schedule.at(100) == pytest.approx(0.5)


def test_all_lengths_in_steps_are_multiplied_by_the_batch_size():
    flags = "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2 --lr 1 --min-lr 0.1"
    flags += " --decoupled-lr 0.5 --decoupled-min-lr 0.2 --global-batch-size 8"
    flags += " --weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2"
    run = parse(f"{MINIMAL} {flags}")
    for decoupled, rates in ((False, (1.0, 0.1)), (True, (0.5, 0.2))):
        schedule = run.learning_rate_schedule(decoupled=decoupled)
        assert (schedule.max_lr, schedule.min_lr) == rates
        lengths = schedule.warmup_samples, schedule.wsd_decay_samples, schedule.decay_samples
        assert lengths == (16, 24, 80)
    assert run.learning_rate_schedule() == run.learning_rate_schedule(decoupled=False)
    assert run.weight_decay_schedule().samples == 80


def test_the_length_of_a_run_may_be_given_in_samples():
    run = parse(f"{SAMPLES} --lr-warmup-samples 10 --lr-decay-samples 50 --lr 1.0")
    assert (run.train_iters, run.train_samples) == (10, 85)
    schedule = run.learning_rate_schedule()
    assert (schedule.warmup_samples, schedule.decay_samples) == (10, 50)
    assert schedule.at(30) == pytest.approx(0.5)
    run = parse(f"{SAMPLES} --lr-warmup-fraction 0.1")
    schedule = run.learning_rate_schedule()
    assert (schedule.warmup_samples, schedule.decay_samples) == (8, 85)
    annealing = "--lr-decay-style WSD --lr-wsd-decay-samples 30"
    assert parse(f"{SAMPLES} {annealing}").learning_rate_schedule().wsd_decay_samples == 30


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{MINIMAL} --train-samples 9", "--train-iters and --train-samples exclude each other"),
        (f"{SAMPLES} --lr-decay-iters 9", "and --lr-decay-iters exclude each other; give --lr-de"),
        (f"{SAMPLES} --lr-warmup-iters 9", "--train-samples and --lr-warmup-iters exclude"),
        (f"{SAMPLES} --lr-wsd-decay-iters 9", "--train-samples and --lr-wsd-decay-iters exc"),
        (f"{MINIMAL} --lr-decay-samples 9", "--train-iters and --lr-decay-samples exclude each"),
        (f"{MINIMAL} --lr-warmup-samples 9", "give --lr-warmup-iters"),
        (f"{SAMPLES} --lr-warmup-samples 9 --lr-warmup-fraction 0.1", "exclude each other"),
        (f"{SAMPLES} --train-samples 7", "--train-samples 7 is less than one step of 8 samples"),
    ],
)
def test_lengths_in_steps_and_samples_exclude_each_other(command, message):
    with pytest.raises(TrainError) as caught:
        parse(command)
    assert message in str(caught.value) and "\n" not in str(caught.value)
