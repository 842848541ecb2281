"""Biases of a ``config.json`` with one field for those of attention."""

from functools import partial

from megatron_models.families.settings import (
    Custom,
    HFConfig,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig

_NAME = "attention_bias"


def _from_hf(title: str, hf_config: HFConfig, *, absent: bool, mlp: bool) -> dict[str, bool]:
    attention = hf_config.get(_NAME, absent)
    if not isinstance(attention, bool):
        raise unsupported_hf_field(title, _NAME, attention, [False, True])
    one = attention and not mlp
    return {
        "add_bias_linear": attention and mlp,
        "add_qkv_bias": one,
        "add_attention_out_bias": one,
        "add_mlp_bias": mlp and not attention,
    }


def _to_hf(config: GPTConfig, *, mlp: bool) -> dict[str, bool]:
    if config.has_mlp_bias != mlp:
        raise unsupported_field("has_mlp_bias", repr(mlp), config.has_mlp_bias)
    if config.has_qkv_bias != config.has_attention_out_bias:
        raise unsupported_field(
            "has_qkv_bias", repr(config.has_attention_out_bias), config.has_qkv_bias
        )
    return {_NAME: config.has_qkv_bias}


def attention_bias(*, absent: bool, mlp: bool) -> Custom:
    """Returns the setting of biases in both projections of attention, or in none.

    Args:
        absent: Whether attention has them in a file without ``attention_bias``.
        mlp: Whether feed-forward layers have biases, in every model of the family.
    """
    return Custom(
        fields=("add_bias_linear", "add_qkv_bias", "add_attention_out_bias", "add_mlp_bias"),
        hf_fields=(_NAME,),
        read=partial(_from_hf, absent=absent, mlp=mlp),
        write=partial(_to_hf, mlp=mlp),
    )
