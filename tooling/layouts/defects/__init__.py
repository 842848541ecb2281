"""Planted defects, each of a kind that real training code has shipped.

A defect replaces one function while a layout trains; the run on one rank that it is compared with
has none. The proof must find every defect (`integration_tests/test_layouts.py`).
"""

from layouts.defects import (  # each enters its defects into the catalogue
    adapters,
    context,
    deltas,
    dropout,
    experts,
    gradients,
    heads,
    latents,
    losses,
    mixed,
    multi_token,
    norms,
    offsets,
    overlap,
    pipelines,
    pools,
    recurrent,
    relative,
    scales,
    selections,
    shards,
    sparse,
    tensor,
    widths,
)
from layouts.defects.catalogue import DEFECTS, Defect, planted

__all__ = [
    "DEFECTS",
    "Defect",
    "adapters",
    "context",
    "deltas",
    "dropout",
    "experts",
    "gradients",
    "heads",
    "latents",
    "losses",
    "mixed",
    "multi_token",
    "norms",
    "offsets",
    "overlap",
    "pipelines",
    "planted",
    "pools",
    "recurrent",
    "relative",
    "scales",
    "selections",
    "shards",
    "sparse",
    "tensor",
    "widths",
]
