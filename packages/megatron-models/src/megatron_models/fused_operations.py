"""Operations of `megatron_kernels` that stand for several others. Importing it has no torch."""

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
