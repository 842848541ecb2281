"""Defects planted on purpose, each of a kind that has been shipped by somebody.

A defect is a replacement of one function while a layout trains; the run on one rank that it is
compared with is clean. Every one must turn the proof red (`integration_tests/test_layouts.py`).
"""

from layouts.defects import (  # each enters its defects into the catalogue
    adapters,
    context,
    dropout,
    experts,
    gradients,
    losses,
    norms,
    pipelines,
    places,
    pools,
    shards,
    tensor,
    turns,
)
from layouts.defects.catalogue import DEFECTS, Defect, planted

__all__ = [
    "DEFECTS",
    "Defect",
    "adapters",
    "context",
    "dropout",
    "experts",
    "gradients",
    "losses",
    "norms",
    "pipelines",
    "places",
    "planted",
    "pools",
    "shards",
    "tensor",
    "turns",
]
