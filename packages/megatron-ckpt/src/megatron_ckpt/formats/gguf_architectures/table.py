"""The table of GGUF architectures.

A new architecture is a module beside this one that defines an `Architecture`, and a line in the
table.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from megatron_ckpt.formats.gguf_architectures.architecture import Architecture
from megatron_ckpt.formats.gguf_architectures.gemma3 import GEMMA3
from megatron_ckpt.formats.gguf_architectures.llama import LLAMA

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {"gemma3": GEMMA3, "llama": LLAMA}
)
"""Architectures by their name in the metadata ``general.architecture``."""
