"""Scores of a classification from the counts of its classes. Importing it does not import torch."""

from collections.abc import Sequence
from math import nan, sqrt


def scores(
    hits: Sequence[float], predicted: Sequence[float], labels: Sequence[float]
) -> dict[str, float]:
    """Returns the F1 score and the Matthews correlation coefficient.

    With two classes, ``F1`` is the score of the second class, as for GLUE's MRPC and QQP. With
    more, ``macro F1`` is the mean over all classes. A class without labels and predictions has
    the score 0. The correlation is that of Gorodkin (2004) for any number of classes, and 0 if all
    labels or all predictions are of one class.

    Args:
        hits: Number of samples of each class with the right prediction.
        predicted: Number of predictions of each class.
        labels: Number of labels of each class.
    """
    count, right = sum(labels), sum(hits)
    each = [
        2 * hit / (found + real) if found + real else 0.0
        for hit, found, real in zip(hits, predicted, labels, strict=True)
    ]
    f1 = {"F1": each[1]} if len(each) == 2 else {"macro F1": sum(each) / len(each)}
    product = sum(found * real for found, real in zip(predicted, labels, strict=True))
    squares = (count**2 - sum(n**2 for n in predicted)) * (count**2 - sum(n**2 for n in labels))
    if not count:
        return dict.fromkeys((*f1, "MCC"), nan)
    return {**f1, "MCC": (right * count - product) / sqrt(squares) if squares else 0.0}
