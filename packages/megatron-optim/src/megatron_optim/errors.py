"""The exception this package raises for mistakes of its user."""


class OptimError(ValueError):
    """A setting, parameter or checkpoint value that megatron-optim cannot use."""
