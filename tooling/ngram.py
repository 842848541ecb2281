"""An interpolated n-gram language model with modified Kneser-Ney smoothing.

It is the strongest model that only counts, so a trained transformer must beat it: Chen and Goodman,
"An empirical study of smoothing techniques for language modeling" (1999), section 3. The held-out
text influences nothing: discounts come from the training counts only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

UNSEEN = -1


@dataclass(frozen=True)
class _Order:
    """Statistics of the k-grams of one k.

    Attributes:
        keys: Sorted keys of the k-grams that occur. A key is the index of the k-gram without its
            last
            token, times the vocabulary size, plus the last token. A k-gram's index is its position
            here.
        discounted: Count of each k-gram minus its discount.
        totals: Sum of the counts after each context, by the index of the context.
        backoff: Share of the total that the discounts leave after each context.
    """

    keys: Ids
    discounted: Floats
    totals: Floats
    backoff: Floats


class NgramModel:
    """Counts of the training tokens for sequences of up to ``order`` tokens.

    Args:
        tokens: Training text as one stream, `[t]`.
        vocabulary: Number of token ids.
        order: Tokens in an n-gram including the predicted one; 2 is a bigram model.
    """

    def __init__(self, tokens: Ids, vocabulary: int, order: int) -> None:
        self.vocabulary = vocabulary
        # numbers[k][i] is the number of the k-gram that begins at token i; the 0-gram has number 0.
        numbers: list[Ids] = [np.zeros(len(tokens) + 1, dtype=np.int64)]
        keys: list[Ids] = []
        first: list[Ids] = []  # where each k-gram occurs first
        counts: list[Ids] = []
        for k in range(1, order + 1):
            key = numbers[k - 1][: len(tokens) - k + 1] * vocabulary + tokens[k - 1 :]
            unique, place, number, count = np.unique(
                key, return_index=True, return_inverse=True, return_counts=True
            )
            keys.append(unique)
            first.append(place)
            counts.append(count)
            numbers.append(number)
        self._orders = []
        for k in range(1, order + 1):
            count = counts[k - 1]
            if k < order:  # how many different tokens stand before it
                follows = numbers[k][first[k] + 1]
                # The k-gram that opens the text may have none before it: it counts as one.
                count = np.maximum(np.bincount(follows, minlength=len(keys[k - 1])), 1)
            contexts = len(keys[k - 2]) if k > 1 else 1
            self._orders.append(_order(keys[k - 1], count, contexts, vocabulary))

    def loss(self, inputs: Ids, labels: Ids) -> float:
        """Returns the mean negative log-likelihood of `labels` in nats; both arguments are `[r,
        s]`.

        Label j of a row is predicted from inputs up to j of that row, as in a transformer.
        """
        return float(-np.log(self.probabilities(inputs, labels)).mean())

    def probabilities(self, inputs: Ids, labels: Ids) -> Floats:
        """Returns the probability of each label after the inputs of its row up to it, `[r, s]`."""
        found = np.full(labels.shape, 1.0 / self.vocabulary)
        for k, order in enumerate(self._orders, start=1):
            context = self._contexts(inputs, k - 1)
            seen = context != UNSEEN
            inside = np.where(seen, context, 0)
            place = _find(order.keys, inside * self.vocabulary + labels)
            discounted = np.where(place == UNSEEN, 0.0, order.discounted[place])
            interpolated = discounted / order.totals[inside] + order.backoff[inside] * found
            found = np.where(seen, interpolated, found)
        return found

    def _contexts(self, inputs: Ids, length: int) -> Ids:
        """Returns the index of the last ``length`` tokens at each position, or `UNSEEN`, `[r, s]`.

        A context that nothing follows in the training text is unseen as well.
        """
        number = np.zeros(inputs.shape, dtype=np.int64)
        for back in range(length, 0, -1):
            keys = self._orders[length - back].keys
            token = np.full(inputs.shape, UNSEEN)
            token[:, back - 1 :] = inputs[:, : inputs.shape[1] - back + 1]
            known = (number != UNSEEN) & (token != UNSEEN)
            place = _find(keys, np.where(known, number * self.vocabulary + token, UNSEEN))
            number = np.where(known, place, UNSEEN)
        if length:
            totals = self._orders[length].totals
            number = np.where((number != UNSEEN) & (totals[number] > 0), number, UNSEEN)
        return number


def _order(keys: Ids, counts: Ids, contexts: int, vocabulary: int) -> _Order:
    """Discounts the counts of all k-grams of one k."""
    kinds = np.minimum(counts, 3)
    discounts = np.array([0.0, *_discounts(counts)])
    taken = discounts[kinds]
    context = keys // vocabulary
    totals = np.bincount(context, weights=counts, minlength=contexts)
    left = np.bincount(context, weights=taken, minlength=contexts)
    backoff = left / np.maximum(totals, 1.0)
    return _Order(keys, counts - taken, totals, backoff)


def _discounts(counts: Ids) -> tuple[float, float, float]:
    """Returns the discounts of counts of 1, of 2 and of more (equation 26 of the paper).

    The formula needs enough n-grams that occur 1, 2, 3 and 4 times. Single tokens of a BPE are
    frequent: if one of these numbers is 0, or a discount is below 0, the values are those of
    KenLM's ``--discount_fallback``.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == k)) for k in (1, 2, 3, 4))
    if n1 * n2 * n3 * n4:
        y = n1 / (n1 + 2 * n2)
        found = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
        if min(found) >= 0:
            return found
    return 0.5, 1.0, 1.5


def _find(keys: Ids, wanted: Ids) -> Ids:
    """Returns the index of each wanted key in the sorted ``keys``, or `UNSEEN`."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, place, UNSEEN)
