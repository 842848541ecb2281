"""Which source the n-th sample of a blend comes from, computed from n and the weights alone.

Sources are the leaves of a binary tree. Of the first n samples that reach an inner node, the left
child gets its share of n rounded to a whole number and the right child the rest, so the n-th sample
goes left if one more sample would make that number grow. Weights are fractions of integers, and
all of it is integer arithmetic: nothing drifts, however large n is, and nothing is stored.

A rounding at a node is wrong by at most half a sample, and a child inherits its share of what its
parent is wrong by. Huffman's tree puts large weights near the root and makes every ancestor's
weight grow at least like Fibonacci's numbers, so a source is never wrong by more than 1.68 samples;
what occurs is less (see `Apportionment.max_error`, and the tests). Megatron's greedy rule stays
near 1 too, but has to be run from the first sample on.

Source: the rounding is that of Adams' and Webster's apportionment between two parties; Huffman, "A
method for the construction of minimum-redundancy codes", 1952.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, lcm
from typing import NamedTuple, TypeAlias

from megatron_data.errors import DataError
from megatron_data.order.protocol import BlendEntry


class _Node(NamedTuple):
    """Two subtrees and their integer weights; a subtree that is a number is a source."""

    left: "_Tree"
    right: "_Tree"
    left_weight: int
    weight: int


_Tree: TypeAlias = "int | _Node"


class Apportionment:
    """Samples shared out to sources in proportion to weights.

    Args:
        weights: positive numbers. A float stands for the decimal number it is printed as, so 0.1
            is a tenth.

    Raises:
        DataError: no weight, or one that is not a positive number.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        self.weights = tuple(_integers(weights))
        self._tree = _huffman(self.weights)

    def __getitem__(self, sample: int) -> BlendEntry:
        """Returns where a sample comes from.

        Raises:
            IndexError: a negative number.
        """
        if sample < 0:
            raise IndexError(f"sample {sample} of a blend")
        tree = self._tree
        while isinstance(tree, _Node):
            left, right, left_weight, weight = tree
            before, rest = divmod(2 * sample * left_weight + weight, 2 * weight)
            if rest + 2 * left_weight >= 2 * weight:  # one more sample makes the share grow
                tree, sample = left, before
            else:
                tree, sample = right, sample - before
        return BlendEntry(tree, sample)

    def counts(self, samples: int) -> list[int]:
        """Returns how many of the first `samples` samples come from each source."""
        counts = [0] * len(self.weights)
        reached: list[tuple[_Tree, int]] = [(self._tree, samples)]
        while reached:
            tree, number = reached.pop()
            if isinstance(tree, _Node):
                before = _share(tree, number)
                reached += [(tree.left, before), (tree.right, number - before)]
            else:
                counts[tree] = number
        return counts

    def max_error(self) -> float:
        """Returns a bound of the samples by which a source is ever off its share."""
        worst = 0.0
        reached: list[tuple[_Tree, float]] = [(self._tree, 0.0)]
        while reached:
            tree, error = reached.pop()
            worst = max(worst, error)
            if isinstance(tree, _Node):
                share = tree.left_weight / tree.weight
                reached.append((tree.left, share * error + 0.5))
                reached.append((tree.right, (1 - share) * error + 0.5))
        return worst


def _share(node: _Node, samples: int) -> int:
    """How many of the first `samples` samples of a node go left: its share, rounded half up."""
    return (2 * samples * node.left_weight + node.weight) // (2 * node.weight)


def _integers(weights: Sequence[float | Fraction]) -> list[int]:
    """Whole numbers in the proportion of the weights."""
    good = [isfinite(weight) and weight > 0 for weight in weights]
    if not all(good) or not good:
        raise DataError(f"blend weights {list(weights)}; each must be a positive number")
    exact = [
        weight if isinstance(weight, Fraction) else Fraction(repr(weight)) for weight in weights
    ]
    common = lcm(*(fraction.denominator for fraction in exact))
    return [int(fraction * common) for fraction in exact]


def _huffman(weights: Sequence[int]) -> _Tree:
    """The tree, made by joining the two lightest subtrees; of equal ones those made first."""
    made = len(weights)
    waiting: list[tuple[int, int, _Tree]] = [
        (weight, source, source) for source, weight in enumerate(weights)
    ]
    heapq.heapify(waiting)
    while len(waiting) > 1:
        light, _, left = heapq.heappop(waiting)
        heavy, _, right = heapq.heappop(waiting)
        joined = _Node(left, right, light, light + heavy)
        heapq.heappush(waiting, (joined.weight, made, joined))
        made += 1
    return waiting[0][2]
