"""Keys of settings in older configuration files, which are still read."""

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
"""The present key of a setting by its key in older files."""
