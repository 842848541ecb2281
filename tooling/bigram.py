"""An interpolated bigram language model: the least a trained transformer must beat.

p(next | previous) = a · bigram + (1 - a) · (b · unigram + (1 - b) · uniform), from relative
frequencies in the training tokens (Jelinek and Mercer, 1980). The weights a and b are chosen on the
*validation* tokens themselves, the most favourable choice there is.
"""

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class BigramModel:
    """Counts of the training tokens.

    Args:
        tokens: the training text as one stream, `[t]`.
        vocabulary: number of token ids.
    """

    def __init__(self, tokens: Tokens, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.unigram = np.bincount(tokens, minlength=vocabulary) / len(tokens)
        self.previous = np.bincount(tokens[:-1], minlength=vocabulary)
        pairs, self.counts = np.unique(tokens[:-1] * vocabulary + tokens[1:], return_counts=True)
        self.pairs = pairs

    def loss(self, inputs: Tokens, labels: Tokens) -> tuple[float, float, float]:
        """Mean negative log-likelihood in nats of `labels` after `inputs`, both `[n]`.

        Returns:
            The loss at the best weights, and those weights (a, b).
        """
        wanted = inputs * self.vocabulary + labels
        place = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        count = np.where(self.pairs[place] == wanted, self.counts[place], 0)
        bigram = count / np.maximum(self.previous[inputs], 1)
        unigram = self.unigram[labels]
        best = (np.inf, 0.0, 0.0)
        for b in (0.9, 0.95, 0.98, 0.99, 0.995, 0.999):
            rest = b * unigram + (1 - b) / self.vocabulary
            for a in np.arange(0.02, 1.0, 0.02):
                loss = float(-np.log(a * bigram + (1 - a) * rest).mean())
                best = min(best, (loss, float(a), b))
        return best
