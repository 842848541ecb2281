"""The exception this package raises for mistakes of its user."""

from megatron_parallel.errors import FieldError


class OptimError(FieldError):
    """A setting, parameter or checkpoint value that megatron-optim cannot use."""
