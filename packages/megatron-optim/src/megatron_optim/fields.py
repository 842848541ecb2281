"""Metadata of settings. This module does not import torch."""

from typing import Any


def flag(name: str, help_text: str, **more: Any) -> dict[str, Any]:
    """Returns the metadata of a dataclass field that is a setting of a run.

    Args:
        name: The flag on a command line.
        help_text: What the setting does.
        more: Further metadata: ``choices``, ``unit``, and ``read_by="update rule"`` for a setting
            that only some update rules read (``UpdateRuleKind.supported_settings``).
    """
    return {"flag": name, "help": help_text, **more}
