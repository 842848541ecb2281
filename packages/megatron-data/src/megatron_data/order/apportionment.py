"""Computes the source of the n-th sample of a blend from n and the weights alone.

The sources are the leaves of a binary tree. Of the first n samples that reach an inner node, the
left child receives its share of n, rounded to an integer, and the right child receives the rest.
The n-th sample therefore goes left if one more sample increases the left child's count. Weights are
integer ratios and all arithmetic is integer arithmetic, so the counts do not drift for any n, and
nothing is stored.

Rounding at a node adds an error of at most half a sample, and a child inherits its share of its
parent's error. The tree is a Huffman tree: large weights are near the root, and the weights of the
ancestors of a source grow at least like the Fibonacci numbers. The error of a source is therefore
at most 1.68 samples. Actual errors are smaller (see `Apportionment.max_error` and the tests).
Megatron's greedy rule also stays near 1, but must be evaluated from the first sample on.

Source: the rounding of Adams' and Webster's apportionment between two parties; Huffman, "A method
for the construction of minimum-redundancy codes" (1952).
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from itertools import count
from math import isfinite, lcm
from typing import NamedTuple, TypeAlias

from megatron_data.errors import DataError
from megatron_data.order.protocol import BlendEntry


class _Node(NamedTuple):
    """An inner node with integer weights. A subtree that is an int is the index of a source."""

    left: "_Tree"
    right: "_Tree"
    left_weight: int
    weight: int


_Tree: TypeAlias = "int | _Node"


class Apportionment:
    """Assigns samples to sources in proportion to weights.

    Args:
        weights: Positive numbers. A float counts as the decimal number that it is printed as: 0.1
            is exactly one tenth.

    Raises:
        DataError: `weights` is empty, or a weight is not a positive finite number.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        self.weights = tuple(_integers(weights))
        self._tree = _huffman(self.weights)

    def __getitem__(self, sample: int) -> BlendEntry:
        """Returns the source of a sample and the sample's index in that source.

        Raises:
            IndexError: `sample` is negative.
        """
        if sample < 0:
            raise IndexError(f"sample {sample} of a blend; give at least 0")
        tree = self._tree
        while isinstance(tree, _Node):
            left, right, left_weight, weight = tree
            before, rest = divmod(2 * sample * left_weight + weight, 2 * weight)
            if rest + 2 * left_weight >= 2 * weight:  # one more sample increases the rounded share
                tree, sample = left, before
            else:
                tree, sample = right, sample - before
        return BlendEntry(tree, sample)

    def counts(self, samples: int) -> list[int]:
        """Returns the number of samples from each source among the first `samples`."""
        counts = [0] * len(self.weights)
        stack: list[tuple[_Tree, int]] = [(self._tree, samples)]
        while stack:
            tree, number = stack.pop()
            if isinstance(tree, _Node):
                before = _share(tree, number)
                stack += [(tree.left, before), (tree.right, number - before)]
            else:
                counts[tree] = number
        return counts

    def max_error(self) -> float:
        """Returns an upper bound on the deviation of a source from its share, in samples."""
        worst = 0.0
        stack: list[tuple[_Tree, float]] = [(self._tree, 0.0)]
        while stack:
            tree, error = stack.pop()
            worst = max(worst, error)
            if isinstance(tree, _Node):
                share = tree.left_weight / tree.weight
                stack.append((tree.left, share * error + 0.5))
                stack.append((tree.right, (1 - share) * error + 0.5))
        return worst


def _share(node: _Node, samples: int) -> int:
    """Returns how many of a node's first `samples` samples go left: the share, rounded half up."""
    return (2 * samples * node.left_weight + node.weight) // (2 * node.weight)


def _integers(weights: Sequence[float | Fraction]) -> list[int]:
    """Returns integers in the ratio of the weights."""
    valid = [isfinite(weight) and weight > 0 for weight in weights]
    if not all(valid) or not valid:
        raise DataError(f"blend weights {list(weights)}; each must be a positive number")
    exact = [
        weight if isinstance(weight, Fraction) else Fraction(repr(weight)) for weight in weights
    ]
    common = lcm(*(fraction.denominator for fraction in exact))
    return [int(fraction * common) for fraction in exact]


def _huffman(weights: Sequence[int]) -> _Tree:
    """Returns the Huffman tree of the weights. Ties are resolved in favour of older subtrees."""
    ids = count(len(weights))
    heap: list[tuple[int, int, _Tree]] = [
        (weight, source, source) for source, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        light_weight, _, left = heapq.heappop(heap)
        heavy_weight, _, right = heapq.heappop(heap)
        joined = _Node(left, right, light_weight, light_weight + heavy_weight)
        heapq.heappush(heap, (joined.weight, next(ids), joined))
    return heap[0][2]
