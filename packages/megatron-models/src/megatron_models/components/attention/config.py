"""The configuration of attention, and the sizes that follow from it.

Importing this module does not import torch.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_models.components.embedding.spec import PositionConfig
from megatron_models.components.fields import flag
from megatron_models.errors import ConfigError

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
RopeScalingType = Literal["none", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(PositionConfig):
    """Heads, rotary positions and softmax of attention.

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
    rotary_base: float = field(
        default=10000.0,
        metadata=flag("--rotary-base", "base of the rotary frequencies (theta)", positive=True),
    )
    rotary_percent: float = field(
        default=1.0,
        metadata=flag(
            "--rotary-percent", "fraction of each head's channels that is rotated, in (0, 1]"
        ),
    )
    rotary_interleaved: bool = field(
        default=False,
        metadata=flag(
            "--rotary-interleaved",
            "rotate neighbouring channels instead of the two halves of a head",
        ),
    )
    rope_scaling_type: RopeScalingType = field(
        default="none",
        metadata=flag(
            "--rope-scaling-type",
            "scaling of rotary frequencies for sequences longer than in the original training",
            choices=get_args(RopeScalingType),
        ),
    )
    rope_scaling_factor: float = field(
        default=8.0,
        metadata=flag("--rope-scaling-factor", "factor of the rotary scaling", positive=True),
    )
    rope_scaling_low_freq_factor: float = field(
        default=1.0,
        metadata=flag(
            "--rope-scaling-low-freq-factor",
            "llama3: wavelengths above original length / this value are scaled in full",
            positive=True,
        ),
    )
    rope_scaling_high_freq_factor: float = field(
        default=4.0,
        metadata=flag(
            "--rope-scaling-high-freq-factor",
            "llama3: wavelengths below original length / this value are not scaled",
            positive=True,
        ),
    )
    rope_scaling_original_length: int = field(
        default=8192,
        metadata=flag(
            "--rope-scaling-original-length",
            "llama3: sequence length of the original training",
            positive=True,
            unit="tokens",
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

    def _fill(self) -> None:
        super()._fill()
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(
                "{rotary_percent:name} must lie in (0, 1], not {rotary_percent:repr}", vars(self)
            )
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
        if self.position_embedding_type == "rope":
            self._check_rotation()

    def _check_rotation(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ConfigError(
                "rotary positions rotate pairs of channels, but {kv_channels} x {rotary_percent} "
                f"gives {self.rotary_dim}; make it even",
                vars(self),
            )
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        if self.rope_scaling_type == "llama3" and low >= high:
            raise ConfigError(
                "{rope_scaling_low_freq_factor} must be below {rope_scaling_high_freq_factor}",
                vars(self),
            )

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
    def rotary_dim(self) -> int:
        """Rotated channels of a head; 0 with learned positions."""
        if self.position_embedding_type != "rope":
            return 0
        return int(self.kv_channels * self.rotary_percent)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_out_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.add_bias_linear or self.add_attention_out_bias
