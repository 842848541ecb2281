"""The ``megatron-train`` command."""

from megatron_train.cli.main import main

__all__ = ["main"]
