"""tooling/ngram.py beside a plain reading of the formulas, with dictionaries."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from ngram import NgramModel

VOCABULARY = 7
ORDER = 3


def text(length: int, seed: int) -> list[int]:
    """Tokens of which some follow one another more often than by chance; token 6 never occurs."""
    generator = np.random.default_rng(seed)
    tokens = [0]
    for _ in range(length - 1):
        jump = generator.choice(6, p=[0.55, 0.2, 0.1, 0.07, 0.05, 0.03])
        tokens.append(int((tokens[-1] * 2 + 1 + jump) % 6))
    return tokens


def by_hand(tokens: list[int], order: int):
    """p(w | context) by recursion over dictionaries."""
    grams = {
        k: Counter(tuple(tokens[i : i + k]) for i in range(len(tokens) - k + 1))
        for k in range(1, order + 1)
    }
    counts = {order: grams[order]}
    for k in range(1, order):
        before = defaultdict(set)
        for gram in grams[k + 1]:
            before[gram[1:]].add(gram[0])
        counts[k] = {gram: max(len(before[gram]), 1) for gram in grams[k]}
    discounts = {}
    for k, count in counts.items():
        n = [sum(c == i for c in count.values()) for i in range(5)]
        discounts[k] = [0.0, 0.5, 1.0, 1.5]
        if 0 not in n[1:]:
            y = n[1] / (n[1] + 2 * n[2])
            found = [0.0, *(i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3))]
            discounts[k] = found if min(found) >= 0 else discounts[k]

    def probability(word: int, context: tuple[int, ...]) -> float:
        k = len(context) + 1
        lower = probability(word, context[1:]) if context else 1 / VOCABULARY
        after = {gram[-1]: c for gram, c in counts[k].items() if gram[:-1] == context}
        if not after:
            return lower
        taken = {w: discounts[k][min(c, 3)] for w, c in after.items()}
        rest = sum(taken.values()) * lower
        return (after.get(word, 0) - taken.get(word, 0.0) + rest) / sum(after.values())

    return probability


@pytest.mark.parametrize("length", [60, 400])  # with too few counts for discounts, and enough
def test_probabilities_are_those_of_the_formulas(length: int) -> None:
    tokens = text(length, 1)
    model = NgramModel(np.array(tokens), VOCABULARY, ORDER)
    probability = by_hand(tokens, ORDER)
    rows = np.array([text(9, 2), text(9, 3), [6, *text(8, 4)], [5, 5, 5, 0, 0, 0, 6, 1, 2]])
    inputs, labels = rows[:, :-1], rows[:, 1:]
    found = model.probabilities(inputs, labels)
    for r, c in np.ndindex(*labels.shape):
        context = tuple(inputs[r, max(0, c - ORDER + 2) : c + 1])
        assert found[r, c] == pytest.approx(probability(labels[r, c], context), rel=1e-12)
    assert model.loss(inputs, labels) == pytest.approx(-np.log(found).mean())


def test_probabilities_after_a_context_add_up_to_one() -> None:
    model = NgramModel(np.array(text(400, 1)), VOCABULARY, ORDER)
    contexts = np.array([[a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)])
    total = np.zeros(len(contexts))
    for word in range(VOCABULARY):
        labels = np.column_stack([contexts[:, 1], np.full(len(contexts), word)])
        total += model.probabilities(contexts, labels)[:, 1]
    assert total == pytest.approx(1.0)


def test_discounts_that_would_be_negative_are_not_taken() -> None:
    """One token occurs 1, 2 and 3 times and three occur 4 times: D3 = 3 - 4 * 1/3 * 3/1 = -1."""
    tokens = np.repeat(np.arange(6), [1, 2, 3, 4, 4, 4])
    labels = np.arange(VOCABULARY)[None]
    found = NgramModel(tokens, VOCABULARY, 1).probabilities(np.zeros_like(labels), labels)
    taken = np.array([0.5, 1.0, 1.5, 1.5, 1.5, 1.5, 0.0])
    counts = np.array([1, 2, 3, 4, 4, 4, 0])
    assert found[0] == pytest.approx((counts - taken + taken.sum() / VOCABULARY) / 18)


def test_longer_contexts_help_where_the_text_has_them() -> None:
    train, held_out = np.array(text(4000, 5)), np.array([text(500, 6)])
    losses = [
        NgramModel(train, VOCABULARY, order).loss(held_out[:, :-1], held_out[:, 1:])
        for order in (1, 2)
    ]
    steps = np.array([0.55, 0.2, 0.1, 0.07, 0.05, 0.03])
    entropy = float(-(steps * np.log(steps)).sum())  # of the next token, given the one before
    assert entropy - 0.1 < losses[1] < losses[0] < math.log(VOCABULARY)
    assert losses[1] < entropy + 0.1
