"""The exception that users of this package catch."""


class KernelError(ValueError):
    """A request that no backend can serve, or arguments that contradict each other."""
