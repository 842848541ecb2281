"""Operations of `megatron_kernels` that stand for several others. Importing it has no torch."""

from collections.abc import Mapping
from typing import Final

SEPARATE: Final = "separate"
"""Choice of a backend of `FUSED` operations: layers call the operations that these stand for."""

FUSED: Final = (
    "add_rms_norm",
    "add_layer_norm",
    "rope_qkv",
    "bias_gelu",
    "bias_swiglu",
    "bias_dropout_add",
    "vocab_embedding",
    "vocab_cross_entropy",
)
"""Operations that layers call instead of several others.

They do so if their backend is chosen, or, without a choice, if one kernel computes them on the
device of the model. On CPUs there are no such kernels, and torch.compile fuses the others itself.
"""

ON_CUDA: Final[frozenset[str]] = frozenset(FUSED)
"""Those that one kernel computes on a CUDA device without a choice: kernels that have run there."""


def fused_on_cuda(name: str, backends: Mapping[str, str]) -> bool:
    """Returns whether layers on a CUDA device call a fused operation.

    `Placement.fused` asks the device itself. This function is for estimates, and imports no torch.

    Args:
        name: One of `FUSED`.
        backends: Chosen backends by operation.
    """
    chosen = backends.get(name, "auto")
    return name in ON_CUDA if chosen == "auto" else chosen != SEPARATE
