"""What layers report about a step beside losses. Importing this module does not import torch."""

from typing import Literal, NamedTuple


class Measure(NamedTuple):
    """One value that describes a layer.

    Attributes:
        name: Name in files, such as ``moe/expert_load``.
        title: Name in the log line.
        value: The value; NaN if there was nothing to measure.
        worst: Which of the values of several layers the log line shows.
        remedy: Why a step with this value is not used, and what to change. Empty if it is used.
    """

    name: str
    title: str
    value: float
    worst: Literal["largest", "smallest"]
    remedy: str = ""


def counter_of(layer: int) -> str:
    """Returns the name under which a layer counts values (`megatron_parallel.AuxiliaryLosses`)."""
    return f"layer {layer}"


OUTPUT_COUNTS = 4
"""The number of values that are counted of the output of a layer: see `Context.observe_output`."""


def scores_name(layer: int) -> str:
    """Returns the name under which a layer reports the largest score of each head."""
    return f"largest scores of layer {layer}"


def output_name(layer: int) -> str:
    """Returns the name under which a layer reports statistics of its output."""
    return f"output of layer {layer}"
