"""The fields of a GPT model's configuration: those of its components.

Importing this module does not import torch. Field names are the flags of Megatron-LM with ``_`` for
``-``, and defaults are Megatron-LM's, so that its recipes have the same meaning here.
"""

from dataclasses import dataclass

from megatron_models.components.attention_variant.config import AttentionVariantConfig
from megatron_models.components.heterogeneous.config import HeterogeneousConfig
from megatron_models.components.latent_attention.config import LatentAttentionConfig
from megatron_models.components.multi_token.config import MultiTokenConfig
from megatron_models.components.mup.config import MupConfig
from megatron_models.components.residual import ResidualConfig
from megatron_models.models.causal_config import CausalConfig


@dataclass(frozen=True)
class GPTFields(
    MupConfig,
    HeterogeneousConfig,
    MultiTokenConfig,
    ResidualConfig,
    AttentionVariantConfig,
    LatentAttentionConfig,
    CausalConfig,
):
    """The fields that the layers of a GPT model are made from."""
