"""The exception that this package raises for errors of the user."""

from megatron_parallel.errors import FieldError


class OptimError(FieldError):
    """A setting, parameter or checkpoint value that megatron-optim cannot use."""
