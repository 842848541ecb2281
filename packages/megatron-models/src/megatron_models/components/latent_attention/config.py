"""The configuration of multi-latent attention. Importing this module does not import torch."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_parallel.nearest import nearest_multiples

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.fields import flag
from megatron_models.components.rotary.config import RotaryConfig
from megatron_models.components.rotary.spec import RotarySpec
from megatron_models.errors import ConfigError

_USED: Final = frozenset(
    {
        *("num_attention_heads", "add_qkv_bias", "add_attention_out_bias"),
        *("attn_logit_softcapping", "softmax_scale", "qk_layernorm"),
    }
)
"""Fields of attention that multi-latent attention has too, beside those of rotary positions."""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(AttentionConfig):
    """Ranks and widths of multi-latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Names and defaults are those of Megatron-LM's flags. Without ``multi_latent_attention`` the
    other fields must have their defaults. With it, ``num_query_groups`` is the number of heads and
    ``kv_channels`` the width of a query head, ``qk_head_dim + qk_pos_emb_head_dim``.
    """

    multi_latent_attention: bool = field(
        default=False,
        metadata=flag(
            "--multi-latent-attention",
            "project keys and values of all heads from one small latent of each token (MLA)",
        ),
    )
    q_lora_rank: int = field(
        default=0,
        metadata=flag(
            "--q-lora-rank",
            "MLA: width of the latent of queries; 0: queries are projected directly",
            nonnegative=True,
            unit="channels",
            small=10,
        ),
    )
    kv_lora_rank: int = field(
        default=32,
        metadata=flag(
            "--kv-lora-rank",
            "MLA: width of the latent of keys and values",
            positive=True,
            unit="channels",
            small=8,
        ),
    )
    qk_head_dim: int = field(
        default=128,
        metadata=flag(
            "--qk-head-dim",
            "MLA: channels of a query or key head that are not rotated",
            positive=True,
            unit="channels",
            small=6,
        ),
    )
    qk_pos_emb_head_dim: int = field(
        default=64,
        metadata=flag(
            "--qk-pos-emb-head-dim",
            "MLA: rotated channels of a query or key head; those of the key are shared by all "
            "heads",
            positive=True,
            unit="channels",
            small=4,
        ),
    )
    v_head_dim: int = field(
        default=128,
        metadata=flag(
            "--v-head-dim",
            "MLA: channels of a value head, at most those of a query head",
            positive=True,
            unit="channels",
            small=6,
        ),
    )
    latent_norm_epsilon: float = field(
        default=0.0,
        metadata=flag(
            "--latent-norm-epsilon",
            "MLA: added to the variance in norms of latents; 0: --norm-epsilon (our name)",
            nonnegative=True,
        ),
    )

    def _fill(self) -> None:
        if self.multi_latent_attention:
            self._set("kv_channels", self.qk_head_dim + self.qk_pos_emb_head_dim)
        super()._fill()

    def _check(self) -> None:
        if self.multi_latent_attention:
            self._check_latent()
        else:
            for name in _own_fields(LatentAttentionConfig, AttentionConfig):
                if name != "multi_latent_attention":
                    self._refuse_change(LatentAttentionConfig, name, "has no effect without")
        super()._check()

    def _check_latent(self) -> None:
        """Refuses what multi-latent attention does not have."""
        expected = {
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.qk_head_dim + self.qk_pos_emb_head_dim,
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "no_rope_freq": "0",
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{{multi_latent_attention:name}} needs {{{name}:name}} = {value!r}, not "
                    f"{{{name}:repr}}",
                    vars(self),
                )
        for name in _own_fields(AttentionConfig, RotaryConfig):
            if name not in _USED and name not in expected:
                self._refuse_change(AttentionConfig, name, "is not supported with")
        if self.latent_norm_epsilon and not self.qk_layernorm:
            raise ConfigError(
                "{latent_norm_epsilon} has no effect without {qk_layernorm:name}; leave it at 0",
                vars(self),
            )
        if self.qk_pos_emb_head_dim % 2:
            raise ConfigError(
                "rotary positions rotate pairs of channels, but {qk_pos_emb_head_dim} is odd; use "
                f"{nearest_multiples(self.qk_pos_emb_head_dim, 2)}",
                vars(self),
            )
        if self.v_head_dim > self.kv_channels:
            raise ConfigError(
                "{v_head_dim} is more than the channels of a query head, {qk_head_dim} + "
                f"{{qk_pos_emb_head_dim}}; use {self.kv_channels} or less",
                vars(self),
            )

    def _refuse_change(self, kind: type[Any], name: str, why: str) -> None:
        """Refuses another value than the default of a field."""
        default = next(each.default for each in dataclasses.fields(kind) if each.name == name)
        if default is not dataclasses.MISSING and getattr(self, name) != default:
            raise ConfigError(
                f"{{{name}}} {why} {{multi_latent_attention:name}}; leave it at {default!r}",
                vars(self),
            )

    def _check_rotation(self) -> None:
        if self.multi_latent_attention:
            self.rotary_spec(self.qk_pos_emb_head_dim)
        else:
            super()._check_rotation()

    @property
    def rotation(self) -> RotarySpec | None:
        """The rotation of queries and keys; None without rotary positions."""
        if self.multi_latent_attention:
            return self.rotary_spec(self.qk_pos_emb_head_dim)
        return super().rotation

    @property
    def has_query_latent(self) -> bool:
        """Whether queries come from a latent of their own."""
        return self.q_lora_rank > 0

    @property
    def has_query_latent_bias(self) -> bool:
        """Whether the projection to the latent of queries has a bias."""
        return self.has_query_latent and self.add_qkv_bias

    @property
    def latent_softmax_scale(self) -> float:
        """Factor of attention scores: ``m^2 / sqrt(kv_channels)``, or ``softmax_scale`` if set.

        YaRN scales scores by ``m^2`` with ``m = 0.1 mscale_all_dim ln(factor) + 1``; otherwise m is
        1. Megatron-Core and Hugging Face compute the same.
        """
        given = self.softmax_scale
        if given:
            return given
        magnitude, scaling = 1.0, None if self.rotation is None else self.rotation.scaling
        weight: float = getattr(scaling, "mscale_all_dim", 0.0)
        factor: float = getattr(scaling, "factor", 1.0)
        if weight and factor > 1:
            magnitude = 0.1 * weight * math.log(factor) + 1.0
        return magnitude**2 / math.sqrt(self.kv_channels)


def _own_fields(kind: type[Any], base: type[Any]) -> list[str]:
    """Returns the names of a configuration's fields that its base does not have."""
    known = {each.name for each in dataclasses.fields(base)}
    return [each.name for each in dataclasses.fields(kind) if each.name not in known]
