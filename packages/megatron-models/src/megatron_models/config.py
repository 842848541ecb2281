"""The configuration of a GPT model: a frozen dataclass of plain values, checked when it is made.

Importing this module does not import torch. Field names are the flags of Megatron-LM with ``_`` for
``-``, and defaults are Megatron's, so a recipe written for it reads the same here.
"""

import dataclasses
import difflib
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megatron_models.config_checks import FILLED, check_fit, check_range, check_type
from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import layer_pattern

PositionEmbedding = Literal["learned_absolute", "rope"]
LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
RopeScalingType = Literal["none", "linear", "llama3"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]


def _flag(flag: str, help_text: str, **metadata: Any) -> dict[str, Any]:
    return {"flag": flag, "help": help_text, **metadata}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a decoder-only transformer, and nothing about how it is trained or laid out.

    ``num_query_groups``, ``kv_channels`` and ``ffn_hidden_size`` may be left at 0; they are filled
    in when the configuration is made, so that a reader always finds the numbers in use.

    Raises:
        ConfigError: a value of the wrong type or range, or values that do not fit together. The
            message names the fields and the numbers.
    """

    num_layers: int = field(metadata=_flag("--num-layers", "number of transformer layers"))
    hidden_size: int = field(
        metadata=_flag("--hidden-size", "width of the residual stream", unit="channels")
    )
    num_attention_heads: int = field(
        metadata=_flag("--num-attention-heads", "number of query heads")
    )
    vocab_size: int = field(
        metadata=_flag("--vocab-size", "number of true tokens, before padding", unit="tokens")
    )
    max_position_embeddings: int = field(
        metadata=_flag(
            "--max-position-embeddings", "longest sequence the model takes", unit="tokens"
        )
    )
    num_query_groups: int = field(
        default=0,
        metadata=_flag(
            "--num-query-groups",
            "key/value heads, each shared by equally many query heads; 0: one per query head",
        ),
    )
    kv_channels: int = field(
        default=0,
        metadata=_flag(
            "--kv-channels",
            "width of one attention head; 0: hidden_size / num_attention_heads",
            unit="channels",
        ),
    )
    ffn_hidden_size: int = field(
        default=0,
        metadata=_flag(
            "--ffn-hidden-size",
            "width of the feed-forward layer; 0: 4 x hidden_size, or with swiglu two thirds of it "
            "rounded down to a multiple of 64",
            unit="channels",
        ),
    )
    make_vocab_size_divisible_by: int = field(
        default=128,
        metadata=_flag(
            "--make-vocab-size-divisible-by",
            "the vocabulary is padded to a multiple of this, whatever the tensor-parallel size",
            unit="tokens",
        ),
    )
    position_embedding_type: PositionEmbedding = field(
        default="learned_absolute",
        metadata=_flag(
            "--position-embedding-type",
            "learned absolute positions added to the embedding, or rotary ones inside attention",
            choices=get_args(PositionEmbedding),
        ),
    )
    rotary_base: float = field(
        default=10000.0, metadata=_flag("--rotary-base", "base of the rotary frequencies (theta)")
    )
    rotary_percent: float = field(
        default=1.0,
        metadata=_flag(
            "--rotary-percent", "part of each head's channels that is rotated, in (0, 1]"
        ),
    )
    rotary_interleaved: bool = field(
        default=False,
        metadata=_flag(
            "--rotary-interleaved",
            "rotate neighbouring channels instead of the two halves of a head",
        ),
    )
    rope_scaling_type: RopeScalingType = field(
        default="none",
        metadata=_flag(
            "--rope-scaling-type",
            "how rotary frequencies are stretched to sequences longer than those trained on",
            choices=get_args(RopeScalingType),
        ),
    )
    rope_scaling_factor: float = field(
        default=8.0,
        metadata=_flag("--rope-scaling-factor", "factor by which frequencies are stretched"),
    )
    rope_scaling_low_freq_factor: float = field(
        default=1.0,
        metadata=_flag(
            "--rope-scaling-low-freq-factor",
            "llama3: wavelengths above original length / this are stretched in full",
        ),
    )
    rope_scaling_high_freq_factor: float = field(
        default=4.0,
        metadata=_flag(
            "--rope-scaling-high-freq-factor",
            "llama3: wavelengths below original length / this are left as they are",
        ),
    )
    rope_scaling_original_length: int = field(
        default=8192,
        metadata=_flag(
            "--rope-scaling-original-length",
            "llama3: sequence length before the stretching",
            unit="tokens",
        ),
    )
    normalization: Normalization = field(
        default="LayerNorm",
        metadata=_flag(
            "--normalization",
            "normalisation before attention, before the feed-forward layer and at the end",
            choices=get_args(Normalization),
        ),
    )
    norm_epsilon: float = field(
        default=1e-05, metadata=_flag("--norm-epsilon", "added to the variance in normalisation")
    )
    activation: Activation = field(
        default="gelu",
        metadata=_flag(
            "--activation",
            "feed-forward activation: exact GELU, its tanh approximation, or SwiGLU",
            choices=get_args(Activation),
        ),
    )
    add_bias_linear: bool = field(
        default=True, metadata=_flag("--disable-bias-linear", "biases in every linear layer")
    )
    add_qkv_bias: bool = field(
        default=False,
        metadata=_flag(
            "--add-qkv-bias", "a bias in the QKV projection even without add_bias_linear"
        ),
    )
    add_attention_out_bias: bool = field(
        default=False,
        metadata=_flag(
            "--add-attention-out-bias",
            "a bias in the output projection of attention even without add_bias_linear (our name)",
        ),
    )
    add_mlp_bias: bool = field(
        default=False,
        metadata=_flag(
            "--add-mlp-bias",
            "biases in feed-forward layers and experts even without add_bias_linear (our name)",
        ),
    )
    untie_embeddings_and_output_weights: bool = field(
        default=False,
        metadata=_flag(
            "--untie-embeddings-and-output-weights",
            "an output matrix of its own instead of the token embedding",
        ),
    )
    softmax_type: SoftmaxType = field(
        default="vanilla",
        metadata=_flag(
            "--softmax-type",
            "of attention: a sink beside the keys, which takes a share and has no value, with a "
            "logit of 0 (off-by-one) or a learned one for each head (learnable)",
            choices=get_args(SoftmaxType),
        ),
    )
    num_experts: int = field(
        default=0,
        metadata=_flag(
            "--num-experts",
            "experts in place of each feed-forward layer (mixture of experts); 0: none",
        ),
    )
    moe_router_topk: int = field(
        default=2, metadata=_flag("--moe-router-topk", "experts that each token goes to")
    )
    moe_ffn_hidden_size: int = field(
        default=0,
        metadata=_flag(
            "--moe-ffn-hidden-size", "width of one expert; 0: ffn_hidden_size", unit="channels"
        ),
    )
    moe_shared_expert_intermediate_size: int = field(
        default=0,
        metadata=_flag(
            "--moe-shared-expert-intermediate-size",
            "width of an expert that every token goes to besides; 0: none",
            unit="channels",
        ),
    )
    moe_layer_freq: str = field(
        default="1",
        metadata=_flag(
            "--moe-layer-freq",
            "which layers have experts: every N-th from the first, or a pattern of ones and zeros "
            "such as [0]+[1]*3",
        ),
    )
    moe_router_pre_softmax: bool = field(
        default=False,
        metadata=_flag(
            "--moe-router-pre-softmax",
            "softmax over all experts before the choice instead of over the chosen ones after it",
        ),
    )
    moe_router_load_balancing_type: LoadBalancing = field(
        default="aux_loss",
        metadata=_flag(
            "--moe-router-load-balancing-type",
            "load is balanced over a micro-batch, over each of its sequences, or not at all",
            choices=get_args(LoadBalancing),
        ),
    )
    moe_aux_loss_coeff: float = field(
        default=0.0, metadata=_flag("--moe-aux-loss-coeff", "weight of the load balancing loss")
    )
    moe_z_loss_coeff: float = field(
        default=0.0,
        metadata=_flag("--moe-z-loss-coeff", "weight of the z loss, which keeps router logits low"),
    )
    init_method_std: float = field(
        default=0.02,
        metadata=_flag(
            "--init-method-std",
            "standard deviation of initial weights; projections back to the residual stream get it "
            "divided by sqrt(2 x num_layers)",
        ),
    )

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            check_type(self, each)
        check_range(self)
        unset = [name for name in FILLED if getattr(self, name) == 0]
        if "kv_channels" in unset and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "{hidden_size} is not a multiple of {num_attention_heads}; change one of them or "
                "set {kv_channels:name}",
                vars(self),
            )
        defaults = {
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.hidden_size // self.num_attention_heads,
            "ffn_hidden_size": self._default_ffn(),
        }
        for name in unset:
            object.__setattr__(self, name, defaults[name])
        if self.num_experts and not self.moe_ffn_hidden_size:
            object.__setattr__(self, "moe_ffn_hidden_size", self.ffn_hidden_size)
        check_fit(self)

    def _default_ffn(self) -> int:
        if self.activation != "swiglu":
            return 4 * self.hidden_size
        return max(64, int(4 * self.hidden_size * 2 / 3) // 64 * 64)

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of ``make_vocab_size_divisible_by``."""
        unit = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // unit) * unit

    @property
    def query_size(self) -> int:
        """Width of all query heads together, ``n * d``."""
        return self.num_attention_heads * self.kv_channels

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head, ``n / g``."""
        return self.num_attention_heads // self.num_query_groups

    def groups_on_rank(self, tp: int) -> int:
        """Query groups whose keys and values one of ``tp`` tensor-parallel ranks has.

        Where there are more ranks than groups each has one, and shares it with others.
        """
        return max(1, self.num_query_groups // tp)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated; 0 with learned positions."""
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

    @property
    def has_mlp_bias(self) -> bool:
        """Whether feed-forward layers and experts have biases."""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer is gated, so that its first matrix is double."""
        return self.activation == "swiglu"

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For every layer, whether experts take the place of its feed-forward layer."""
        if not self.num_experts:
            return (False,) * self.num_layers
        return layer_pattern(self.moe_layer_freq, self.num_layers)

    @property
    def output_std(self) -> float:
        """Standard deviation of the projections that write to the residual stream."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)

    def check_sequence_length(self, length: int) -> None:
        """Raise ConfigError if a sequence of ``length`` tokens has no position for each of them."""
        if length > self.max_position_embeddings:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than max_position_embeddings "
                f"{self.max_position_embeddings}; shorten it or build the model with more positions"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain JSON value."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return every field as JSON text, one field a line."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GPTConfig":
        """Build a configuration from plain values; an unknown key is an error with the nearest."""
        known = [each.name for each in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown model configuration key {reprlib.repr(key)}{hint}")
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in values]:
            raise ConfigError(f"the model configuration lacks {', '.join(missing)}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> "GPTConfig":
        """Build a configuration from JSON text, or from the object it was parsed to."""
        if isinstance(text, Mapping):
            return cls.from_dict(text)
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the model configuration is not JSON: {error}") from None
        except RecursionError:
            raise ConfigError("the model configuration is nested too deeply to be read") from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"the model configuration is a JSON {type(values).__name__}, not a map"
            )
        return cls.from_dict(values)
