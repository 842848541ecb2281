"""What this package raises for values that cannot be used."""

from megatron_parallel.errors import FieldError


class ConfigError(FieldError):
    """A model configuration, or a request made to a model, that cannot be met."""
