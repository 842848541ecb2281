"""The configuration of attention, and the sizes that follow from it.

Importing this module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, get_args

from megatron_parallel.nearest import nearest_divisors, nearest_multiples

from megatron_models.components.attention.span import Span
from megatron_models.components.fields import flag, literal
from megatron_models.components.rotary.config import RotaryConfig
from megatron_models.components.rotary.spec import RotarySpec
from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import PatternError, pattern_text, skipping_pattern

TEMPERATURE_FLOOR: Final = 8192
"""Default of ``attn_temperature_floor``, that of Llama 4."""

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
QKNormScope = Literal["head", "projection"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(RotaryConfig):
    """Heads and softmax of attention.

    ``num_query_groups`` and ``kv_channels`` may be left at 0. They are then derived from other
    fields when the configuration is created.
    """

    num_attention_heads: int = field(
        metadata=flag(
            "--num-attention-heads",
            "number of query heads",
            positive=True,
            small=4,
        )
    )
    num_query_groups: int = field(
        default=0,
        metadata=flag(
            "--num-query-groups",
            "key/value heads, each shared by the same number of query heads; 0: one per query head",
            positive=True,
            derived=True,
            small=2,
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
            small=6,
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
    softmax_scale: float = field(
        default=0.0,
        metadata=flag(
            "--softmax-scale",
            "factor of the attention scores; 0: 1 / sqrt(kv_channels) (our name)",
            nonnegative=True,
        ),
    )
    sliding_window: int = field(
        default=0,
        metadata=flag(
            "--sliding-window",
            "number of tokens that a token attends to, its own included; 0: all (our name; "
            "Megatron-LM's --window-size L,R counts the tokens beside it)",
            nonnegative=True,
            unit="tokens",
            small=5,
        ),
    )
    attention_chunk_size: int = field(
        default=0,
        metadata=flag(
            "--attention-chunk-size",
            "a token attends only to tokens of its chunk of this many positions (Llama 4); 0: all "
            "(our name)",
            nonnegative=True,
            unit="tokens",
            small=5,
        ),
    )
    window_attn_skip_freq: str = field(
        default="",
        metadata=flag(
            "--window-attn-skip-freq",
            "layers without the window or chunks: a number N, every N-th layer, or a pattern like "
            "([1]*5+[0])*4, in which 1 is a layer with them; empty: none",
        ),
    )

    qk_layernorm: bool = field(
        default=False,
        metadata=flag(
            "--qk-layernorm",
            "norms of queries and keys before rotary positions, of the kind of --normalization; "
            "with multi-latent attention, norms of the latents",
        ),
    )
    qk_layernorm_scope: QKNormScope = field(
        default="head",
        metadata=flag(
            "--qk-layernorm-scope",
            "what --qk-layernorm normalizes: each head, with one gain of kv_channels for all heads "
            "(head, as in Qwen3), or the channels of all heads together (projection, as in OLMo 2) "
            "(our name)",
            choices=get_args(QKNormScope),
        ),
    )

    attention_output_gate: bool = field(
        default=False,
        metadata=flag(
            "--attention-output-gate",
            "multiply the output of each head by the sigmoid of a gate, which the QKV projection "
            "computes too (Qwen3-Next)",
        ),
    )
    scale_alibi: bool = field(
        default=False,
        metadata=flag(
            "--scale-alibi",
            "multiply the biases of alibi by the factor of the attention scores, as in Falcon (our "
            "name)",
        ),
    )
    qk_l2_norm: bool = field(
        default=False,
        metadata=flag(
            "--qk-l2-norm",
            "divide each head's queries and keys by their root mean square after rotary positions "
            "(Llama 4); not in layers without rotary positions",
        ),
    )
    attn_temperature_scale: float = field(
        default=0.0,
        metadata=flag(
            "--attn-temperature-scale",
            "in layers without rotary positions, multiply the queries at position p by "
            "scale * ln(1 + floor((p + 1) / floor)) + 1 (Llama 4); 0: no such factor (our name)",
            nonnegative=True,
        ),
    )
    attn_temperature_floor: int = field(
        default=TEMPERATURE_FLOOR,
        metadata=flag(
            "--attn-temperature-floor",
            "number of positions after which the factor of --attn-temperature-scale changes (our "
            "name)",
            positive=True,
            unit="tokens",
            small=2,
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if self.kv_channels == 0 and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "{hidden_size} is not a multiple of {num_attention_heads}; use {hidden_size:name} "
                f"{nearest_multiples(self.hidden_size, self.num_attention_heads)}, or set "
                "{kv_channels:name}",
                vars(self),
            )
        self._set("num_query_groups", self.num_attention_heads)
        self._set("kv_channels", self.hidden_size // self.num_attention_heads)

    def _check(self) -> None:
        super()._check()
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                "{num_attention_heads} is not a multiple of {num_query_groups}; every group needs "
                "the same number of heads; use {num_query_groups:name} "
                f"{nearest_divisors(self.num_attention_heads, self.num_query_groups)}",
                vars(self),
            )
        if self.qk_layernorm_scope != "head" and not self.qk_layernorm:
            raise ConfigError(
                "{qk_layernorm_scope} has no effect without {qk_layernorm:name}; leave it out",
                vars(self),
            )
        if self.rotary_base_local and self.span == Span():
            raise ConfigError(
                "{rotary_base_local} is the base of layers with a window, but no layer has one; "
                "set {sliding_window:name} or {attention_chunk_size:name}, or leave it at 0",
                vars(self),
            )
        if self.scale_alibi and not self.has_alibi:
            raise ConfigError(
                "{scale_alibi:name} has no effect with {position_embedding_type}; leave it out",
                vars(self),
            )
        self._check_rotation()
        self._check_unrotated()

    def _check_unrotated(self) -> None:
        """Refuses options of layers with or without rotary positions that no layer has."""
        rotary = self.position_embedding_type == "rope"
        if self.qk_l2_norm and not self.has_rotation:
            raise ConfigError(
                "{qk_l2_norm:name} needs rotary positions, not {position_embedding_type}",
                vars(self),
            )
        if self.qk_l2_norm and self.qk_layernorm:
            raise ConfigError(
                "{qk_l2_norm:name} and {qk_layernorm:name} exclude each other; choose one",
                vars(self),
            )
        if not self.attn_temperature_scale:
            if self.attn_temperature_floor != TEMPERATURE_FLOOR:
                raise ConfigError(
                    "{attn_temperature_floor} has no effect without {attn_temperature_scale:name}; "
                    "leave it out",
                    vars(self),
                )
        elif rotary and not any(self.unrotated_layers):
            raise ConfigError(
                "{attn_temperature_scale} needs layers without rotary positions; set "
                "{no_rope_freq:name}",
                vars(self),
            )
        elif self.position_embedding_type not in ("rope", "none"):
            raise ConfigError(
                "{attn_temperature_scale} is not supported with {position_embedding_type}; use "
                "'rope' or 'none'",
                vars(self),
            )

    def _check_rotation(self) -> None:
        """Refuses a rotation that no pairs of channels fit."""
        self.rotary_spec(self.kv_channels)
        if not self.window_attn_skip_freq:
            return
        if not (self.sliding_window or self.attention_chunk_size):
            raise ConfigError(
                "{window_attn_skip_freq} selects layers without a window, but no layer has one; "
                "set {sliding_window:name} or {attention_chunk_size:name}",
                vars(self),
            )
        try:
            windowed = self.windowed_layers
        except PatternError as error:
            reason = literal(error)
            raise ConfigError(f"{{window_attn_skip_freq:name}}: {reason}", vars(self)) from None
        if not any(windowed):
            name = "sliding_window" if self.sliding_window else "attention_chunk_size"
            raise ConfigError(
                f"{{window_attn_skip_freq}} leaves no layer with {{{name}}}; set {{{name}:name}} "
                "to 0, or leave {window_attn_skip_freq:name} out for a window in every layer",
                vars(self),
            )

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some of the layers."""
        changes = super().fields_for_layers(layers)
        if self.window_attn_skip_freq:
            windowed = (self.windowed_layers[layer] for layer in layers)
            changes["window_attn_skip_freq"] = pattern_text(windowed)
        return changes

    @cached_property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer has the window or the chunks.

        As in Megatron-LM, every N-th layer counted from 1 is without them.
        """
        text = self.window_attn_skip_freq
        return skipping_pattern(text, self.num_layers) if text else (True,) * self.num_layers

    @property
    def span(self) -> Span:
        """How far the attention of a layer reaches."""
        return Span(self.sliding_window or None, self.attention_chunk_size or None)

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
    def has_alibi(self) -> bool:
        """Whether attention scores have linear biases by distance (Press et al. 2022)."""
        return self.position_embedding_type == "alibi"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_out_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.add_bias_linear or self.add_attention_out_bias
