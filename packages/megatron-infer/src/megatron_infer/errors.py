"""The exception that this package raises for errors of the user."""


class InferError(ValueError):
    """A request, sampling setting or checkpoint that megatron-infer cannot use."""
