"""Settings that once had another place in files, which are still read from there."""

from collections.abc import Mapping
from typing import Final

_OF_PLACEMENT = (
    "sequence_parallel",
    "tp_comm_overlap",
    "cp_comm_type",
    "context_parallel_split",
    "moe_token_dispatcher_type",
)

RENAMED_KEYS: Final[Mapping[str, str]] = {f"training.{n}": f"placement.{n}" for n in _OF_PLACEMENT}
"""From the place of a setting in files that were written before to its place now."""
