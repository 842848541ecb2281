"""Scores and outputs that layers report: in which steps, and what follows, computed by hand."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from megatron_models import GPTConfig, Placement, find_kind, output_name, scores_name
from megatron_optim import QKClipConfig
from megatron_parallel import Mesh
from megatron_train.errors import TrainError
from megatron_train.observation import MAX_LOGIT, Observation

MODEL = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=11,
    max_position_embeddings=8,
    add_bias_linear=False,
)
SCORES, OUTPUTS = {scores_name(0): 4, scores_name(1): 4}, {output_name(0): 1, output_name(1): 1}


def observe(clip=False, scores=False, outputs=False, **settings):
    place = Placement(Mesh.single(), dtype=torch.float64)
    stages = find_kind("gpt").build(MODEL, place, seed=1)
    config = QKClipConfig(qk_clip=clip, **settings)
    return Observation(MODEL, stages, config, 3, scores=scores, outputs=outputs)


@pytest.mark.parametrize(
    ("clip", "scores", "outputs"), list(itertools.product([False, True], repeat=3))
)
def test_layers_report_what_is_logged_in_steps_with_a_line_and_what_clips_in_all(
    clip, scores, outputs
):
    observation = observe(clip, scores, outputs)
    between, line = observation.reports(4), observation.reports(6)
    assert dict(between.counters) == {} and between.maxima == (SCORES if clip else {})
    assert set(line.counters) == (set(OUTPUTS) if outputs else set())
    assert line.maxima == (SCORES if clip or scores else {}) | (OUTPUTS if outputs else {})


def test_numbers_of_a_line_by_hand():
    squares = torch.tensor([90.0, 4.0, 2.0, 12.0], dtype=torch.float64)  # 10 of 12 are finite
    counts = {output_name(0): squares, output_name(1): squares * 2}
    values = torch.tensor([1.0, 5.0, 2.0, 3.0], dtype=torch.float64)
    maxima = {scores_name(0): values, scores_name(1): values - 1}
    maxima |= {output_name(0): values[:1] + 6, output_name(1): values[:1] + 7}
    observation = observe(scores=True, outputs=True)
    assert observation.measured(counts, maxima, 4) == {}
    found = {name: value.item() for name, value in observation.measured(counts, maxima, 6).items()}
    assert found == {
        MAX_LOGIT: 5.0,
        **{f"output rms of layers.{layer}": 3.0 for layer in (0, 1)},
        **{f"output zeros of layers.{layer}": 4 / 12 for layer in (0, 1)},
        **{f"output nonfinite of layers.{layer}": 2 / 12 for layer in (0, 1)},
        "output max of layers.0": 7.0,
        "output max of layers.1": 8.0,
    }
    assert observe(outputs=True).measured(counts, maxima, 6).keys() == found.keys() - {MAX_LOGIT}
    assert observe(scores=True).measured(counts, maxima, 6).keys() == {MAX_LOGIT}


def test_scores_above_the_threshold_shrink_the_rows_of_their_group():
    observation = observe(clip=True, qk_clip_threshold=2.0, qk_clip_alpha=0.25)
    largest = torch.tensor([1.0, 8.0, 2.0, 0.5], dtype=torch.float64)  # 2.0 is not above
    maxima = {scores_name(0): largest, scores_name(1): largest.flip(0)}
    found = observation.factors(maxima)
    assert len(found) == 2
    first, second = (factors for _, factors in sorted(found.items()))
    gamma = 2.0 / 8.0
    for factors, group in ((first, 0), (second, 1)):
        assert torch.equal(factors[1 - group], torch.ones_like(factors[0]))
        per_row = factors[group].unique().tolist()  # of queries, keys and values
        assert per_row == pytest.approx([gamma**0.75, gamma**0.25, 1.0])
        assert math.prod(per_row) == pytest.approx(gamma)


class Mixer:
    """Stands for the settings of a part of a layer that mixes tokens."""

    def __init__(self, pairs=1, rows=None, error=None, heads=4):
        self._pairs, self._rows, self._error, self.heads = pairs, rows, error, heads

    def multiply_adds_per_pair(self):
        return self._pairs

    def clipped_rows(self, alpha):
        if self._error is not None:
            raise ValueError(self._error)
        return {"weight": ()} if self._rows is None else self._rows


def watched(layers, clip=False):
    model = SimpleNamespace(numbered_mixers=layers)
    return Observation(model, [], QKClipConfig(qk_clip=clip), 3, scores=not clip, outputs=False)


@pytest.mark.parametrize("clip", [False, True])
def test_scores_are_those_of_layers_with_attention(clip):
    recurrent = Mixer(pairs=0, error="no rows")
    found = watched({1: [recurrent], 5: [recurrent, Mixer()], 7: [Mixer(heads=2)]}, clip)
    assert found.reports(3).maxima == {scores_name(5): 4, scores_name(7): 2}


@pytest.mark.parametrize(
    ("clip", "layers", "message"),
    [
        (False, {1: [Mixer(pairs=0)], 2: []}, "has no effect, since no layer has attention; leave"),
        (True, {}, "has no effect, since no layer has attention; leave it out"),
        (True, {1: [Mixer()], 3: [Mixer(error="it is gone")]}, "has no effect in layer 3: it is g"),
        (True, {1: [Mixer()], 3: [Mixer(rows={})]}, "does not support the Mixer of layer 3; leave"),
        (True, {4: [Mixer(), Mixer()]}, "does not support the Mixer of layer 4; leave it out"),
        (False, {4: [Mixer(), Mixer()]}, "does not support the Mixer of layer 4; leave it out"),
    ],
)
def test_layers_whose_scores_cannot_be_bounded_or_measured_are_refused(clip, layers, message):
    flag = "--qk-clip" if clip else "--log-max-attention-logit"
    with pytest.raises(TrainError, match=f"^{flag} {message}"):
        watched(layers, clip)


def test_scores_are_measured_where_they_cannot_be_bounded():
    found = watched({3: [Mixer(error="it is gone")], 4: [Mixer(rows={})]})
    assert found.reports(3).maxima == {scores_name(3): 4, scores_name(4): 4}
