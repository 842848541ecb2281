"""The configuration of attention, and the sizes that follow from it.

Importing this module does not import torch.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_models.components.fields import flag
from megatron_models.components.rotary.config import RotaryConfig
from megatron_models.components.rotary.spec import RotarySpec
from megatron_models.errors import ConfigError

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(RotaryConfig):
    """Heads and softmax of attention.

    ``num_query_groups`` and ``kv_channels`` may be left at 0. They are then derived from other
    fields when the configuration is created.
    """

    num_attention_heads: int = field(
        metadata=flag("--num-attention-heads", "number of query heads", positive=True)
    )
    num_query_groups: int = field(
        default=0,
        metadata=flag(
            "--num-query-groups",
            "key/value heads, each shared by the same number of query heads; 0: one per query head",
            positive=True,
            derived=True,
        ),
    )
    kv_channels: int = field(
        default=0,
        metadata=flag(
            "--kv-channels",
            "width of one attention head; 0: hidden_size / num_attention_heads",
            positive=True,
            derived=True,
            unit="channels",
        ),
    )
    add_qkv_bias: bool = field(
        default=False,
        metadata=flag(
            "--add-qkv-bias", "a bias in the QKV projection even without add_bias_linear"
        ),
    )
    add_attention_out_bias: bool = field(
        default=False,
        metadata=flag(
            "--add-attention-out-bias",
            "a bias in the output projection of attention even without add_bias_linear (our name)",
        ),
    )
    softmax_type: SoftmaxType = field(
        default="vanilla",
        metadata=flag(
            "--softmax-type",
            "softmax of attention: plain (vanilla), or with an attention sink, which has no value "
            "and a logit of 0 (off-by-one) or one learned logit for each head (learnable)",
            choices=get_args(SoftmaxType),
        ),
    )
    attn_logit_softcapping: float = field(
        default=0.0,
        metadata=flag(
            "--attn-logit-softcapping",
            "bound of attention scores x, which become bound * tanh(x / bound) (Gemma 2); "
            "0: none (our name)",
            nonnegative=True,
        ),
    )

    qk_layernorm: bool = field(
        default=False,
        metadata=flag(
            "--qk-layernorm",
            "MLA: a norm of each latent, of the kind of --normalization; other attention does not "
            "support it yet",
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if self.kv_channels == 0 and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "{hidden_size} is not a multiple of {num_attention_heads}; change one of them or "
                "set {kv_channels:name}",
                vars(self),
            )
        self._set("num_query_groups", self.num_attention_heads)
        self._set("kv_channels", self.hidden_size // self.num_attention_heads)

    def _check(self) -> None:
        super()._check()
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                "{num_attention_heads} is not a multiple of {num_query_groups}; every group needs "
                "the same number of heads",
                vars(self),
            )
        self._check_rotation()

    def _check_rotation(self) -> None:
        """Refuses a rotation that no pairs of channels fit."""
        self.rotary_spec(self.kv_channels)

    @property
    def query_size(self) -> int:
        """Width of all query heads together, ``n * d``."""
        return self.num_attention_heads * self.kv_channels

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head, ``n / g``."""
        return self.num_attention_heads // self.num_query_groups

    def groups_on_rank(self, tp: int) -> int:
        """Returns the number of query groups with keys and values on one of ``tp`` ranks.

        With more ranks than groups, each rank has one group and shares it with other ranks.
        """
        return max(1, self.num_query_groups // tp)

    @property
    def rotation(self) -> RotarySpec | None:
        """The rotation of queries and keys; None without rotary positions."""
        return self.rotary_spec(self.kv_channels)

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head; 0 without rotary positions."""
        return 0 if self.rotation is None else self.rotation.channels

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_out_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.add_bias_linear or self.add_attention_out_bias
