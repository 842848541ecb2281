"""What the layers of one forward pass share: masks of spans, positions and what they report."""

from functools import partial

import pytest
import torch
from megatron_kernels import Mask
from megatron_models.components.attention.span import EVERYTHING, Span
from megatron_models.components.context import Context
from megatron_models.components.dropout import Dropout, StageDropout
from megatron_models.components.measure import OUTPUT_COUNTS
from megatron_models.components.rotary.spec import RotarySpec
from megatron_parallel import AuxiliaryLosses, DropoutKey, RecomputeConfig

NAME, SCORES = "output of layer 3", "largest scores of layer 3"


def collecting(counters=(), maxima=()):
    return AuxiliaryLosses({}, dict.fromkeys(counters, OUTPUT_COUNTS), dict.fromkeys(maxima, 1))


def dropping(hidden=0.0, attention=0.0):
    key = DropoutKey.for_batch(seed=1, iteration=0, samples=torch.arange(2), positions=4)
    return StageDropout.from_dropout(Dropout(key, hidden, attention), None)


def test_a_span_that_is_not_prepared_narrows_the_mask() -> None:
    span, prepared = Span(window=2), Mask(window=5)
    context = Context(Mask(window=3), masks={Span(chunk=4): prepared})
    assert context.mask_of(EVERYTHING) is context.mask
    assert context.mask_of(Span(chunk=4)) is prepared
    assert (context.mask_of(span).window, context.mask_of(span).chunk) == (2, None)
    assert context.mask_of(Span(window=9)).window == 3


def test_tokens_follow_the_cached_ones_unless_they_have_positions() -> None:
    cpu = torch.device("cpu")
    assert Context(Mask(), offset=5).token_positions(3, cpu).tolist() == [[5], [6], [7]]
    given = torch.tensor([[0, 1, 0], [4, 5, 6]])
    found = Context(Mask(), offset=5, positions=given).token_positions(3, cpu)
    assert found.tolist() == [[0, 4], [1, 5], [0, 6]]


def test_statistics_of_an_output_leave_out_what_is_not_finite() -> None:
    losses = collecting([NAME], [NAME])
    x = torch.tensor([[[3.0, -4.0, 0.0, float("nan")]], [[float("-inf"), 0.0, 1.0, 2.0]]])
    Context(Mask(), auxiliary_losses=losses).observe_output(3, x)
    counts, maxima = losses.counts[NAME], losses.maxima[NAME]
    assert counts is not None and maxima is not None
    # Sum of squares of -4, 3, 1 and 2; two zeros; a NaN and an infinity; eight elements.
    assert counts.tolist() == pytest.approx([30, 2, 2, 8])
    assert maxima.tolist() == [4.0]


def test_a_recomputation_does_not_report_again() -> None:
    losses = collecting([NAME], [NAME, SCORES])
    context = Context(Mask(), auxiliary_losses=losses)
    q, k = torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2)
    for value in (1.0, 2.0):
        context.observe_output(3, torch.full((1, 1, 2), value))
        context.observe_scores(3, 0, q + value, k + value, EVERYTHING, 1.0)
    counts = losses.counts[NAME]
    assert counts is not None and counts.tolist() == pytest.approx([2, 0, 0, 2])
    scores = losses.maxima[SCORES]
    assert scores is not None and scores.tolist() == [2.0]


def test_nothing_is_reported_under_a_name_that_no_step_asks_for() -> None:
    losses = collecting([NAME], [NAME])
    q = torch.ones(2, 1, 1, 2)
    for context in (Context(Mask(), auxiliary_losses=losses), Context(Mask())):
        context.observe_output(2, q[:, :, 0])
        context.observe_scores(3, 0, q, q, EVERYTHING, None)
        assert not context.observed
    assert losses.counts == {NAME: None} and losses.maxima == {NAME: None}
    assert not Context(Mask()).observes_outputs
    assert Context(Mask(), auxiliary_losses=losses).observes_outputs
    assert not Context(Mask(), auxiliary_losses=collecting([NAME])).observes_outputs


def test_the_largest_score_of_each_head_is_that_of_visible_keys() -> None:
    losses = AuxiliaryLosses({}, maxima={SCORES: 3})
    q = torch.tensor([[1.0, 1.0], [2.0, -1.0]]).view(2, 1, 2, 1)
    k = torch.tensor([[3.0, 3.0], [5.0, 5.0]]).view(2, 1, 2, 1)
    Context(Mask(), auxiliary_losses=losses).observe_scores(3, 1, q, k, EVERYTHING, 0.5)
    found = losses.maxima[SCORES]
    # Head 1: 3, 6 and 10; head 2: 3, -3 and -5. The first query does not see the second key.
    assert found is not None and found.tolist() == [float("-inf"), 5.0, 1.5]


@pytest.mark.parametrize(("hidden", "attention"), [(0.0, 0.5), (0.5, 0.0)])
def test_each_dropout_is_there_only_with_its_probability(hidden, attention) -> None:
    context = Context(Mask(), dropout=dropping(hidden, attention))
    assert context.drops_hidden == (hidden > 0)
    made = context.attention_dropout(2, 4, 1)
    assert (made is not None) == (attention > 0)
    if made is not None:
        assert (made.layer, made.first_head, made.site) == (2, 4, 1)


def test_without_dropout_nothing_is_dropped() -> None:
    x, added = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    context = Context(Mask())
    assert not context.drops_hidden and context.attention_dropout(0, 0, 1) is None
    assert context.hidden_dropout(x, 0, 2) is x
    assert torch.equal(context.add_with_dropout(x, added, 0, 2, backend="auto"), x + added)


def test_dropped_elements_depend_on_the_layer_and_the_site() -> None:
    context, x = Context(Mask(), dropout=dropping(hidden=0.5)), torch.ones(4, 2, 8)
    first = context.hidden_dropout(x, 1, 2)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(context.add_with_dropout(x, x, 1, 2, backend="auto"), x + first)
    assert not torch.equal(context.hidden_dropout(x, 2, 2), first)
    assert not torch.equal(context.hidden_dropout(x, 1, 3), first)


def test_only_a_pass_without_cache_or_ring_has_all_keys() -> None:
    class Cache:
        length = 0

        def update(self, layer, k, v):
            raise AssertionError("no layer is called")

    assert Context(Mask()).has_all_keys
    assert not Context(Mask(), cache=Cache()).has_all_keys


def calls_of_norm(recompute):
    """Returns how often a norm computes in a step, and the gradient of its input."""
    calls = 0

    def norm(x):
        nonlocal calls
        calls += 1
        return x * x

    x = torch.tensor([[[2.0, 3.0]]], requires_grad=True)
    y = Context(Mask(), recompute=recompute).apply_norm(norm, x, torch.square)
    y.sum().backward()
    return calls, x.grad.flatten().tolist()


def test_the_output_of_a_recomputed_norm_is_computed_again() -> None:
    expected = [32.0, 108.0]  # 4 x^3
    chosen = RecomputeConfig(granularity="selective", modules=("layernorm",))
    assert calls_of_norm(RecomputeConfig()) == (1, expected)
    assert calls_of_norm(chosen) == (2, expected)


def test_only_a_chosen_module_is_computed_again() -> None:
    def counted(calls, x):
        calls.append(1)
        return x * x

    for modules, times in ((("mlp",), 2), (("layernorm",), 1)):
        recompute = RecomputeConfig(granularity="selective", modules=modules)
        calls: list[int] = []
        x = torch.tensor([2.0], requires_grad=True)
        context = Context(Mask(), recompute=recompute)
        context.maybe_recompute("mlp", partial(counted, calls), x).backward()
        assert len(calls) == times and x.grad.tolist() == [4.0]


def test_shared_tensors_are_those_of_masks_and_dropout() -> None:
    ids, source = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32)
    narrow, stage = torch.full((1, 2), 2, dtype=torch.int32), dropping(0.5)
    encoder, bias = torch.zeros(2, 1, 4), torch.zeros(1, 2, 2, 2)
    documents, table = torch.zeros(1, 2, dtype=torch.int64), (torch.ones(2, 2), torch.zeros(2, 2))
    context = Context(
        Mask(document_ids=ids),
        {RotarySpec(4, 10_000.0): table},
        masks={Span(2): Mask(document_ids=narrow)},
        cross_mask=Mask(document_ids=source),
        dropout=stage,
        encoder_output=encoder,
        score_bias=bias,
        document_ids=documents,
    )
    key = stage.global_dropout.key
    expected = [*table, ids, narrow, source, key.word0, key.word1, encoder, bias, documents]
    found = context.shared_tensors()
    assert {id(each) for each in found} == {id(each) for each in expected}
    assert len(found) == len(expected)
    assert Context(Mask()).shared_tensors() == []
