"""The layers of a hybrid model as plain data. Importing this module does not import torch."""

from collections.abc import Callable, Mapping
from typing import Final

from megatron_models.components.attention.per_layer import attention_changes
from megatron_models.components.dropout_sites import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron_models.components.gated_delta_net.spec import GatedDeltaNetSpec
from megatron_models.components.layer import Layer, Sublayer
from megatron_models.components.mamba.spec import MambaSpec
from megatron_models.components.mixer import Mixer
from megatron_models.components.mlp.spec import MLPSpec
from megatron_models.components.moe.spec import MoESpec
from megatron_models.components.norm.spec import NormSpec
from megatron_models.components.sparse_attention.spec import SparseAttentionSpec
from megatron_models.models.gpt.layers import attention_kind
from megatron_models.models.hybrid.fields import HybridFields


def hybrid_layers(config: HybridFields) -> dict[int, Layer]:
    """Returns the layers of a model by number: each a norm and one mixer. Equal ones are one."""
    norm = config.component(NormSpec)
    known: dict[Layer, Layer] = {}
    found: dict[int, Layer] = {}
    for number, symbol in enumerate(config.pattern.layers):
        name, site, build = _MIXERS[symbol]
        layer = (Sublayer(name, build(config, number), site, norm),)
        found[number] = known.setdefault(layer, layer)
    return found


def _mamba(config: HybridFields, number: int) -> Mixer:
    return config.component(MambaSpec)


def _delta(config: HybridFields, number: int) -> Mixer:
    return config.component(GatedDeltaNetSpec)


def _attention(config: HybridFields, number: int) -> Mixer:
    return config.component(attention_kind(config), **attention_changes(config, number))


def _sparse(config: HybridFields, number: int) -> Mixer:
    return config.component(SparseAttentionSpec, **attention_changes(config, number))


def _dense(config: HybridFields, number: int) -> Mixer:
    return config.component(MLPSpec)


def _experts(config: HybridFields, number: int) -> Mixer:
    return config.component(MoESpec, layers_with_experts=sum(config.moe_layers))


_MIXERS: Final[Mapping[str, tuple[str, int, Callable[[HybridFields, int], Mixer]]]] = {
    "M": ("mamba", ATTENTION_OUTPUT, _mamba),
    "G": ("attention", ATTENTION_OUTPUT, _delta),
    "*": ("attention", ATTENTION_OUTPUT, _attention),
    "D": ("attention", ATTENTION_OUTPUT, _sparse),
    "-": ("mlp", MLP_OUTPUT, _dense),
    "E": ("mlp", MLP_OUTPUT, _experts),
}
"""Name, dropout site and description of the mixer of each symbol of a pattern."""
