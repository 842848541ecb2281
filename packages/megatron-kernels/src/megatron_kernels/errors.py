"""The exception that users of this package catch."""


class KernelError(ValueError):
    """Raised for arguments that no operation or backend supports."""
