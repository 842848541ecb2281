"""The configuration of attention variants. Importing this module does not import torch."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, get_args

from megatron_models.components.fields import flag, literal
from megatron_models.components.gated_delta_net.config import GatedDeltaNetConfig
from megatron_models.components.sparse_attention.config import SparseAttentionConfig
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import PatternError, pattern_text, skipping_pattern

AttentionVariant = Literal["none", "gated_delta_net", "dsa"]
_OWN: Final[Mapping[str, type[Any]]] = {
    "gated_delta_net": GatedDeltaNetConfig,
    "dsa": SparseAttentionConfig,
}
"""The configuration of each variant, whose fields no other reads."""


@dataclass(frozen=True, kw_only=True)
class AttentionVariantConfig(GatedDeltaNetConfig, SparseAttentionConfig):
    """The mixer that replaces attention, and in which layers. Flags are those of Megatron-LM.

    Without a variant, the fields of its mixer must have their defaults.
    """

    experimental_attention_variant: AttentionVariant = field(
        default="none",
        metadata=flag(
            "--experimental-attention-variant",
            "mixer in place of attention: none, linear attention by gated delta nets in the "
            "layers of --linear-attention-freq (gated_delta_net, as in Qwen3-Next), or sparse "
            "multi-latent attention to keys that an indexer selects (dsa, as in DeepSeek-V3.2)",
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
        for name, entry in _fields_of_variants():
            chosen = self.experimental_attention_variant == name
            if not chosen and getattr(self, entry.name) != entry.default:
                raise ConfigError(
                    f"{{{entry.name}}} has no effect without "
                    f"{{experimental_attention_variant:name}} {name!r}; leave it at "
                    f"{entry.default!r}",
                    vars(self),
                )
        if self.experimental_attention_variant == "gated_delta_net":
            self._check_layers()

    def _check_layers(self) -> None:
        """Refuses a pattern without linear attention."""
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

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some of the layers."""
        changes = super().fields_for_layers(layers)
        if self.linear_attention_freq:
            linear = (self.linear_layers[layer] for layer in layers)
            changes["linear_attention_freq"] = pattern_text(linear)
        return changes

    @cached_property
    def linear_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has linear attention."""
        text = self.linear_attention_freq
        return skipping_pattern(text, self.num_layers) if text else (False,) * self.num_layers

    @property
    def has_sparse_attention(self) -> bool:
        """Whether an indexer selects the keys of attention."""
        return self.experimental_attention_variant == "dsa"


def _fields_of_variants() -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """Yields the fields that only one variant reads, with its name."""
    shared = {each.name for each in dataclasses.fields(StreamConfig)}
    for name, kind in _OWN.items():
        for entry in dataclasses.fields(kind):
            if entry.name not in shared:
                yield name, entry
    for entry in dataclasses.fields(AttentionVariantConfig):
        if entry.name == "linear_attention_freq":
            yield "gated_delta_net", entry
