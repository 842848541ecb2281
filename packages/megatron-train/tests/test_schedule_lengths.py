"""Schedules of a run that continues with another length."""

import pytest
from megatron_optim import LearningRateSchedule, WeightDecaySchedule
from megatron_train.errors import TrainError
from megatron_train.schedule_changes import schedule_changes
from megatron_train.schedule_lengths import settle_schedules

LINEAR = {"max_lr": 1e-2, "warmup_samples": 4}
WSD = {**LINEAR, "decay_style": "WSD", "wsd_decay_style": "linear"}


class Position:
    """The part of a trainer that has schedules and a position."""

    def __init__(self, rate, consumed, decay=None):
        self.learning_rate = self.decoupled_learning_rate = rate
        self.weight_decay = decay or WeightDecaySchedule(start=0.1, end=0.1, samples=100)
        self.iteration, self.consumed_samples = consumed // 2, consumed

    @property
    def schedules(self):
        names = ("learning_rate", "decoupled_learning_rate", "weight_decay")
        return {name: getattr(self, name) for name in names}


def settle(before, now, consumed, choice="unchanged", decays=(None, None)):
    """Returns the learning-rate schedule with which the run continues, and the printed lines."""
    saved, trainer = Position(before, consumed, decays[0]), Position(now, consumed, decays[1])
    state = {"schedules": {name: vars(each) for name, each in saved.schedules.items()}}
    return trainer, settle_schedules(trainer, state, choice)


def linear(samples, **changes):
    return LearningRateSchedule(decay_samples=samples, **{**LINEAR, **changes})


def wsd(samples, annealing=8, **changes):
    lengths = {"decay_samples": samples, "wsd_decay_samples": annealing}
    return LearningRateSchedule(**{**WSD, **lengths, **changes})


def test_a_run_of_the_same_length_continues_with_its_schedule():
    trainer, lines = settle(linear(24), linear(24), 10)
    assert trainer.learning_rate == linear(24) and lines == []


@pytest.mark.parametrize(
    ("before", "now", "consumed", "rates"),
    [
        (linear(24), linear(32), 24, "0 before, 0.002857 after"),
        (linear(24), linear(32), 14, "0.005 before, 0.006429 after"),
        (wsd(24), wsd(40), 24, "0 before, 0.01 after"),
        (wsd(24), wsd(40), 12, "0.01 before, 0.01 after"),  # decays later
        (linear(24), linear(200, warmup_samples=40), 10, "0.007 before, 0.0025 after"),
        (linear(24), linear(24, warmup_samples=12), 10, "0.007 before, 0.008333 after"),
    ],
)
def test_another_length_is_refused_with_both_rates(before, now, consumed, rates):
    with pytest.raises(TrainError) as refused:
        settle(before, now, consumed)
    message = str(refused.value)
    assert f"({rates})" in message and f"before step {consumed // 2}" in message
    for flag in ("use-checkpoint-opt-param-scheduler", "override-opt", "extend-schedule decay"):
        assert f"--{flag}" in message


def test_a_constant_rate_has_no_length():
    trainer, lines = settle(
        linear(24, decay_style="constant"), linear(48, decay_style="constant"), 10
    )
    assert trainer.learning_rate.at(40) == 1e-2 and lines == []


def test_a_weight_decay_that_grows_over_another_length_is_refused():
    rising = [WeightDecaySchedule(start=0.0, end=0.1, samples=n, style="linear") for n in (20, 40)]
    with pytest.raises(TrainError, match=r"weight decay .*\(0.05 before, 0.025 after\)"):
        settle(linear(24), linear(24), 10, decays=rising)
    trainer, _ = settle(linear(24), linear(24), 10, "decay", decays=rising)
    assert trainer.weight_decay == rising[0]


def test_a_jump_on_request_is_reported():
    trainer, lines = settle(linear(24), linear(32), 24, "override")
    assert trainer.learning_rate == linear(32)
    assert lines[0] == "learning rate jumps at step 12: 0 before, 0.002857 after"


def test_a_plateau_is_extended_before_its_decay():
    trainer, _ = settle(wsd(24), wsd(40), 12, "plateau")
    assert trainer.learning_rate == wsd(40)
    trainer, _ = settle(wsd(24), wsd(40, warmup_samples=20), 12, "plateau")  # the warm-up is over
    assert trainer.learning_rate == wsd(40)
    with pytest.raises(TrainError, match=r"the decay began after 16 samples, and 18 are consumed"):
        settle(wsd(24), wsd(40), 18, "plateau")
    with pytest.raises(TrainError, match=r"the style linear has no plateau; use .* decay"):
        settle(linear(24), linear(40), 12, "plateau")


@pytest.mark.parametrize("before", [linear(24, min_lr=1e-3), wsd(24, min_lr=1e-3)])
@pytest.mark.parametrize("consumed", [12, 20, 24])
def test_a_new_decay_begins_with_the_present_rate(before, consumed):
    now = linear(44, min_lr=1e-3)
    trainer, lines = settle(before, now, consumed, "decay")
    extended = trainer.learning_rate
    assert extended.at(consumed) == before.at(consumed) and lines == []
    middle = (consumed + 44) // 2
    assert extended.at(middle) == pytest.approx((before.at(consumed) + 1e-3) / 2)
    assert extended.at(44) == pytest.approx(1e-3)
    again, _ = settle(extended, now, consumed + 6, "decay")  # the same command after a stop
    assert again.learning_rate == extended


def test_a_new_decay_waits_for_the_warm_up():
    with pytest.raises(TrainError, match=r"the warm-up ends after 4 samples, of which 2 are"):
        settle(linear(24), linear(44), 2, "decay")
    with pytest.raises(TrainError, match=r"--extend-schedule decay: .*decay_samples"):
        settle(linear(44), linear(24), 30, "decay")


def test_schedules_are_extended_from_the_first_possible_sample_to_the_last():
    trainer, _ = settle(linear(24), linear(44), 4, "decay")  # the warm-up has ended
    assert trainer.learning_rate.at(4) == 1e-2
    with pytest.raises(TrainError, match="of which 3 are consumed"):
        settle(linear(24), linear(44), 3, "decay")
    trainer, _ = settle(wsd(24), wsd(40), 16, "plateau")  # the decay begins now
    assert trainer.learning_rate == wsd(40)
    with pytest.raises(TrainError, match="the decay began after 16 samples, and 17 are consumed"):
        settle(wsd(24), wsd(40), 17, "plateau")


def test_lengths_that_change_no_rate_from_here_on_are_accepted():
    """The warm-up is over, so its length changes the rates that were, and those of a decay."""
    constant = [linear(24, decay_style="constant", warmup_samples=n) for n in (4, 8)]
    trainer, lines = settle(*constant, 8)
    assert lines == [] and trainer.learning_rate == constant[1]
    with pytest.raises(TrainError, match=r"\(warmup_samples 4, now 8\).*0.01 before, 0.0\d+ after"):
        settle(*constant, 7)


def test_a_jump_is_named_for_each_rate():
    decays = [WeightDecaySchedule(start=0.0, end=0.1, samples=n, style="linear") for n in (20, 40)]
    _, lines = settle(linear(24), linear(32), 14, "override", decays=decays)
    assert lines == [
        "learning rate jumps at step 7: 0.005 before, 0.006429 after",
        "decoupled learning rate jumps at step 7: 0.005 before, 0.006429 after",
        "weight decay jumps at step 7: 0.07 before, 0.035 after",
    ]


def test_changes_of_a_schedule_other_than_lengths_are_described():
    trainer = Position(linear(24), 4)
    state = {"schedules": {name: {**vars(each)} for name, each in trainer.schedules.items()}}
    assert schedule_changes(state, trainer) == ""
    state["schedules"]["learning_rate"] |= {"decay_samples": 99, "max_lr": 0.5, "other": 1}
    state["schedules"]["weight_decay"] |= {"end": 0.2}
    del state["schedules"]["decoupled_learning_rate"]
    assert schedule_changes(state, trainer) == (
        "learning rate: max_lr 0.5, now 0.01; weight decay: end 0.2, now 0.1"
    )
    for damaged in (None, {}, {"schedules": 3}, {"schedules": {"learning_rate": 3}}):
        assert schedule_changes(damaged, trainer) == ""
