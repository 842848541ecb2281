"""The exception this package raises for mistakes of its user."""


class InferError(ValueError):
    """A request, sampling setting or checkpoint that megatron-infer cannot use."""
