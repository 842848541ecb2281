"""An interpolated n-gram language model with modified Kneser-Ney smoothing.

It is the strongest model that only counts, and what a trained transformer has to beat: Chen and
Goodman, "An empirical study of smoothing techniques for language modeling" (1999), section 3.
Nothing is chosen on the text that is measured: discounts come from the training counts alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

UNSEEN = -1


@dataclass(frozen=True)
class _Order:
    """What is known of the k-grams of one k.

    Attributes:
        keys: of the k-grams that occur, sorted; a key is the number of the k-gram without its last
            token, times the vocabulary, plus the last token. A k-gram's number is its place here.
        discounted: count of each, less its discount.
        totals: sum of the counts after each context, by the number of the context.
        backoff: what the discounts leave after each context, as a share of its total.
    """

    keys: Ids
    discounted: Floats
    totals: Floats
    backoff: Floats


class NgramModel:
    """Counts of the training tokens up to ``order`` tokens in a row.

    Args:
        tokens: the training text as one stream, `[t]`.
        vocabulary: number of token ids.
        order: tokens in an n-gram, the predicted one included: 2 is a bigram model.

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
        """Return the mean negative log-likelihood in nats of `labels`, both `[r, s]`.

        Label j of a row is predicted from inputs up to j of that row, as a transformer does.
        """
        return float(-np.log(self.probabilities(inputs, labels)).mean())

    def probabilities(self, inputs: Ids, labels: Ids) -> Floats:
        """Return the probability of each label after the inputs of its row up to it, `[r, s]`."""
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
        """Return the number of the last ``length`` tokens at each place, or `UNSEEN`, `[r, s]`.

        A context after which nothing stands in the training text is unseen as well.
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
    """Discount the counts of all k-grams of one k."""
    kinds = np.minimum(counts, 3)
    discounts = np.array([0.0, *_discounts(counts)])
    taken = discounts[kinds]
    context = keys // vocabulary
    totals = np.bincount(context, weights=counts, minlength=contexts)
    left = np.bincount(context, weights=taken, minlength=contexts)
    backoff = left / np.maximum(totals, 1.0)
    return _Order(keys, counts - taken, totals, backoff)


def _discounts(counts: Ids) -> tuple[float, float, float]:
    """Return what is taken from counts of 1, of 2 and of more (their equation 26).

    It takes enough n-grams that occur 1, 2, 3 and 4 times. Single tokens of a BPE are frequent: if
    one of these numbers is 0, or a discount below 0, they are those of KenLM's
    ``--discount_fallback``.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == k)) for k in (1, 2, 3, 4))
    if n1 * n2 * n3 * n4:
        y = n1 / (n1 + 2 * n2)
        found = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
        if min(found) >= 0:
            return found
    return 0.5, 1.0, 1.5


def _find(keys: Ids, wanted: Ids) -> Ids:
    """Return where in the sorted ``keys`` each wanted key is, or `UNSEEN`."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, place, UNSEEN)
