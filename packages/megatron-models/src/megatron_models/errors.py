"""The error of this package."""

from megatron_parallel.errors import FieldError


class ConfigError(FieldError):
    """Raised for an invalid model configuration, or a request that a model cannot serve."""
