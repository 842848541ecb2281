"""Activations of a ``config.json``, by the names of transformers."""

from typing import Final

from megatron_models.families.settings import Translated

#: GELU and its approximations, ReLU, its square and SiLU. The fast GELU is the tanh approximation
#: with rounded constants.
PLAIN: Final = (
    ("gelu", "gelu"),
    ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu_fast", "gelu_tanh"),
    ("quick_gelu", "quick_gelu"),
    ("relu", "relu"),
    ("relu2", "squared_relu"),
    ("silu", "silu"),
    ("swish", "silu"),
)


def activation(name: str, *, absent: str) -> Translated:
    """Returns the setting of an activation that gates nothing.

    Args:
        name: Name of the field in the family's files.
        absent: Value of a file without one.
    """
    return Translated(name, PLAIN, absent=absent)
