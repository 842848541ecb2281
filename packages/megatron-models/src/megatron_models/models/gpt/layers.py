"""The layers of a GPT model as plain data. Importing this module does not import torch.

Each function returns the part of one layer, by its global number, so that options which apply to
some layers only (experts, windows, positions) have one place each.
"""

from megatron_models.components.attention.per_layer import attention_changes
from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.dropout_sites import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron_models.components.gated_delta_net.spec import GatedDeltaNetSpec
from megatron_models.components.latent_attention.config import LatentAttentionConfig
from megatron_models.components.latent_attention.spec import LatentAttentionSpec
from megatron_models.components.layer import Layer
from megatron_models.components.mixer import Mixer
from megatron_models.components.mlp.spec import MLPSpec
from megatron_models.components.moe.spec import MoESpec
from megatron_models.components.multi_token.config import MultiTokenConfig
from megatron_models.components.multi_token.spec import MultiTokenSpec
from megatron_models.components.norm.spec import NormSpec
from megatron_models.components.sparse_attention.spec import SparseAttentionSpec
from megatron_models.models.gpt.fields import GPTFields


def gpt_layers(config: GPTFields) -> dict[int, Layer]:
    """Returns the layers of a model by number. Equal layers are one object."""
    alike = first_alike(config)
    known: dict[Layer, Layer] = {}
    found: dict[int, Layer] = {}
    for first in sorted(set(alike)):
        layer = gpt_layer(config, first)
        found[first] = known.setdefault(layer, layer)
    return {number: found[first] for number, first in enumerate(alike)}


def first_alike(config: GPTFields) -> list[int]:
    """Returns for each layer the number of the first one with the same options.

    Few layers of a model differ. So the cost of a check of all layers does not depend on their
    number.
    """
    own = [repr(block) for block in config.blocks] or [""] * config.num_layers
    options = zip(
        config.windowed_layers,
        config.unrotated_layers,
        config.linear_layers,
        config.moe_layers,
        own,
        strict=True,
    )
    first: dict[tuple[bool, bool, bool, bool, str], int] = {}
    return [first.setdefault(key, number) for number, key in enumerate(options)]


def gpt_layer(config: GPTFields, number: int) -> Layer:
    """Returns attention and feed-forward sublayer of a layer, with their norms.

    A layer may lack one of them.
    """
    sublayers = (
        ("attention", attention_mixer(config, number), ATTENTION_OUTPUT),
        ("mlp", feed_forward_mixer(config, number), MLP_OUTPUT),
    )
    return config.residual_layer(
        [(name, mixer, site) for name, mixer, site in sublayers if mixer is not None]
    )


def multi_token_layers(config: GPTFields) -> tuple[MultiTokenSpec, ...]:
    """Returns the depths of multi-token prediction; their layers equal the last of the model."""
    depths = range(config.mtp_num_layers)
    if not depths:
        return ()
    own = config.component(MultiTokenConfig, **config.hidden_init)
    norm = config.component(NormSpec)
    layer = gpt_layer(config, config.num_layers - 1)
    return tuple(MultiTokenSpec(own, depth, layer, norm) for depth in depths)


def attention_mixer(config: GPTFields, number: int) -> Mixer | None:
    """Returns the attention of a layer, linear or not, or None if it has none."""
    if config.linear_layers[number]:
        init = dict(config.hidden_init)
        return config.own_mixer(number, "attention", GatedDeltaNetSpec, init)
    changes = {**attention_changes(config, number), **config.hidden_init}
    kind = SparseAttentionSpec if config.has_sparse_attention else attention_kind(config)
    return config.own_mixer(number, "attention", kind, changes)


def attention_kind(config: LatentAttentionConfig) -> type[AttentionSpec | LatentAttentionSpec]:
    """Returns the description of a model's attention."""
    return LatentAttentionSpec if config.multi_latent_attention else AttentionSpec


def feed_forward_mixer(config: GPTFields, number: int) -> Mixer | None:
    """Returns the feed-forward layer of a layer, dense or with experts, or None if it has none."""
    if not config.moe_layers[number]:
        return config.own_mixer(number, "mlp", MLPSpec, dict(config.hidden_init))
    layers = sum(config.moe_layers) + config.mtp_num_layers * config.moe_layers[-1]
    changes = {"layers_with_experts": layers, **config.hidden_init}
    return config.own_mixer(number, "mlp", MoESpec, changes)
