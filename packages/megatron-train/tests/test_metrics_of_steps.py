"""Statistics of gradients and parameters in the steps with a log line, computed by hand."""

import pytest
from megatron_train.statistics import NUM_ZEROS, PARAMS_NORM, Statistics, part_of
from megatron_train.trainer import Callback

from .test_trainer import weights


class Kept(Callback):
    """Keeps the statistics of each step, and the weights after it."""

    def __init__(self):
        self.found, self.weights = [], []

    def on_step(self, trainer, report):
        self.found.append(dict(report.statistics))
        self.weights.append(weights(trainer))


def run(make_trainer, **measured):
    """Returns the statistics of three steps of which the second has a log line, and the weights."""
    kept = Kept()
    statistics = Statistics(["weight"], 2, **measured)
    trainer = make_trainer(train_iters=3, callbacks=[kept], statistics=statistics)
    gradients, step = [], trainer.optimizer.step

    def noting(*words, **more):
        gradients.append(trainer.engine.stages.gradients()["weight"].clone())
        return step(*words, **more)

    trainer.optimizer.step = noting
    trainer.run()
    return kept, gradients


def test_each_number_is_measured_on_request_alone(make_trainer):
    every = dict.fromkeys(("num_zeros", "params_norm", "layer_norms", "ratios"), True)
    kept, gradients = run(make_trainer, **every)
    before, after = kept.weights[0], kept.weights[1]
    expected = {
        NUM_ZEROS: float((gradients[1] == 0).sum()),
        PARAMS_NORM: float(after.norm()),
        "grad norm of weight": float(gradients[1].norm()),
        "params norm of weight": float(after.norm()),
        "update ratio of weight": float((after - before).norm() / before.norm()),
    }
    assert kept.found[0] == kept.found[2] == {}
    assert kept.found[1] == pytest.approx(expected, rel=1e-6) and expected[NUM_ZEROS] > 0
    names = {
        "num_zeros": {NUM_ZEROS},
        "params_norm": {PARAMS_NORM},
        "layer_norms": {"grad norm of weight", "params norm of weight"},
        "ratios": {"update ratio of weight"},
    }
    assert run(make_trainer)[0].found == [{}, {}, {}]
    for setting, wanted in names.items():
        kept, _ = run(make_trainer, **{setting: True})
        assert [set(found) for found in kept.found] == [set(), wanted, set()]
        for name in wanted:
            assert kept.found[1][name] == pytest.approx(expected[name], rel=1e-6)


def test_parts_are_layers_or_first_words():
    names = {
        "decoder.layers.3.mlp.linear_fc1.weight": "decoder.layers.3",
        "decoder.layers.12.weight": "decoder.layers.12",
        "layers.0.norm.bias": "layers.0",
        "embedding.word_embeddings.weight": "embedding",
        "output": "output",
        "mtp.layers.0.inner.layers.7.weight": "mtp.layers.0",
    }
    assert {name: part_of(name) for name in names} == names
    parts = Statistics([*names, "layers.0.norm.weight"], 1).parts
    assert parts == tuple(names.values())


def test_parts_have_numbers_of_their_own(make_trainer):
    names = ["b.x", "weight", "layers.1.y"]  # of which this rank has the second
    trainer = make_trainer()
    statistics = Statistics(names, 1, layer_norms=True)
    trainer.step(trainer.micro_batches(0))
    found = statistics.after(trainer.optimizer, 1)
    norm = float(weights(trainer).norm())
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {
            "params norm of b": 0.0,
            "params norm of weight": norm,
            "params norm of layers.1": 0.0,
        }
    )
