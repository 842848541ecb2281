"""The exceptions this package raises for mistakes of its user."""


class TrainError(ValueError):
    """A setting, file or run that megatron-train cannot use; the message is one line."""


class UsageError(TrainError):
    """A command line that cannot be understood (exit status 2)."""
