"""The exceptions this package raises for mistakes of its user."""

from megatron_train._command import CommandError


class TrainError(ValueError):
    """A setting, file or run that megatron-train cannot use; the message is one line."""


class UsageError(TrainError, CommandError):
    """A command line that cannot be understood (exit status 2)."""
