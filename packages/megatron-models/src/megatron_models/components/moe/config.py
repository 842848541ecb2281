"""The configuration of a mixture of experts. Importing this module does not import torch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_models.components.fields import flag, literal
from megatron_models.components.mlp.spec import MLPConfig
from megatron_models.components.moe.capacity_fields import CapacityFields
from megatron_models.components.moe.router_config import RouterConfig
from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import PatternError, layer_pattern, pattern_text


@dataclass(frozen=True, kw_only=True)
class MoEConfig(CapacityFields, RouterConfig, MLPConfig):
    """Experts, the layers that have them, and the routing of tokens.

    ``moe_ffn_hidden_size`` may be left at 0. With experts it is then derived when the configuration
    is created.
    """

    moe_ffn_hidden_size: int = field(
        default=0,
        metadata=flag(
            "--moe-ffn-hidden-size",
            "width of one expert; 0: ffn_hidden_size",
            nonnegative=True,
            unit="channels",
            small=20,
        ),
    )
    moe_shared_expert_intermediate_size: int = field(
        default=0,
        metadata=flag(
            "--moe-shared-expert-intermediate-size",
            "width of a shared expert, which every token uses too; 0: none",
            nonnegative=True,
            unit="channels",
            small=12,
        ),
    )
    moe_shared_expert_gate: bool = field(
        default=False,
        metadata=flag(
            "--moe-shared-expert-gate",
            "multiply the output of the shared expert by a learned sigmoid of its input, as in "
            "Qwen2-MoE",
        ),
    )
    moe_layer_freq: str = field(
        default="1",
        metadata=flag(
            "--moe-layer-freq",
            "which layers have experts: every N-th from the first, or a pattern of ones and zeros "
            "such as [0]+[1]*3",
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if self.num_experts:
            self._set("moe_ffn_hidden_size", self.ffn_hidden_size)

    def _check(self) -> None:
        super()._check()
        if not self.num_experts:
            for entry in dataclasses.fields(MoEConfig):
                if entry.name.startswith("moe_") and getattr(self, entry.name) != entry.default:
                    raise ConfigError(
                        f"{{{entry.name}}} has no effect without experts; set "
                        f"{{num_experts:name}}, or leave it at {entry.default!r}",
                        vars(self),
                    )
            return
        if self.moe_expert_capacity_factor and self.moe_router_expert_choice:
            raise ConfigError(
                "{moe_expert_capacity_factor} does not work with {moe_router_expert_choice:name}, "
                "with which every expert selects equally many tokens; leave one of them out",
                vars(self),
            )
        if self.moe_expert_capacity_factor > self.num_experts:
            raise ConfigError(
                "{moe_expert_capacity_factor} exceeds {num_experts}, with which an expert accepts "
                f"every selection of all tokens; use at most {self.num_experts}, or 0 for no limit",
                vars(self),
            )
        if self.moe_shared_expert_gate and not self.moe_shared_expert_intermediate_size:
            raise ConfigError(
                "{moe_shared_expert_gate:name} has no effect without a shared expert; set "
                "{moe_shared_expert_intermediate_size:name}",
                vars(self),
            )
        self._check_pattern()

    def _check_pattern(self) -> None:
        try:
            pattern = layer_pattern(self.moe_layer_freq, self.num_layers)
        except PatternError as error:
            raise ConfigError(f"{{moe_layer_freq:name}}: {literal(error)}", vars(self)) from None
        if not any(pattern):
            raise ConfigError(
                "{moe_layer_freq} selects no layer for experts; use 1 for all layers, or "
                "{num_experts:name} 0",
                vars(self),
            )

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some of the layers."""
        changes = super().fields_for_layers(layers)
        if self.num_experts:
            usual = layer_pattern(self.moe_layer_freq, self.num_layers)
            changes["moe_layer_freq"] = pattern_text(usual[layer] for layer in layers)
        return changes

    @cached_property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether experts replace its feed-forward layer."""
        if not self.num_experts:
            return (False,) * self.num_layers
        return layer_pattern(self.moe_layer_freq, self.num_layers)
