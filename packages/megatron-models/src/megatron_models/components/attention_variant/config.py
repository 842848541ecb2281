"""The configuration of attention variants. Importing this module does not import torch."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from megatron_models.components.fields import flag, literal
from megatron_models.components.gated_delta_net.config import GatedDeltaNetConfig
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import PatternError, skipping_pattern

AttentionVariant = Literal["none", "gated_delta_net"]


@dataclass(frozen=True, kw_only=True)
class AttentionVariantConfig(GatedDeltaNetConfig):
    """The mixer that replaces attention, and in which layers. Flags are those of Megatron-LM.

    Without a variant, the fields of its mixer must have their defaults.
    """

    experimental_attention_variant: AttentionVariant = field(
        default="none",
        metadata=flag(
            "--experimental-attention-variant",
            "mixer in place of attention: none, or linear attention by gated delta nets in the "
            "layers of --linear-attention-freq (gated_delta_net, as in Qwen3-Next)",
            choices=get_args(AttentionVariant),
        ),
    )
    linear_attention_freq: str = field(
        default="",
        metadata=flag(
            "--linear-attention-freq",
            "layers with linear attention: a number N, all but every N-th layer, or a pattern like "
            "([1]*3+[0])*4, in which 1 is a layer with linear attention; empty: none",
        ),
    )

    def _check(self) -> None:
        super()._check()
        if self.experimental_attention_variant != "gated_delta_net":
            own = {each.name for each in dataclasses.fields(GatedDeltaNetConfig)}
            own -= {each.name for each in dataclasses.fields(StreamConfig)}
            for entry in dataclasses.fields(AttentionVariantConfig):
                unused = entry.name in own or entry.name == "linear_attention_freq"
                if unused and getattr(self, entry.name) != entry.default:
                    raise ConfigError(
                        f"{{{entry.name}}} has no effect without "
                        "{experimental_attention_variant:name} 'gated_delta_net'; leave it at "
                        f"{entry.default!r}",
                        vars(self),
                    )
            return
        try:
            linear = self.linear_layers
        except PatternError as error:
            reason = literal(error)
            raise ConfigError(f"{{linear_attention_freq:name}}: {reason}", vars(self)) from None
        if not any(linear):
            raise ConfigError(
                "{experimental_attention_variant} needs layers with linear attention; set "
                "{linear_attention_freq:name}, such as 4 for all but every fourth layer",
                vars(self),
            )

    @cached_property
    def linear_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has linear attention."""
        text = self.linear_attention_freq
        return skipping_pattern(text, self.num_layers) if text else (False,) * self.num_layers
