"""The configuration of a hybrid model. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_parallel import ParallelLayout

from megatron_models.components.embedding.spec import EmbeddingSpec
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.norm.spec import NormSpec
from megatron_models.errors import ConfigError
from megatron_models.models.hybrid.fields import HybridFields
from megatron_models.models.hybrid.layers import hybrid_layers


@dataclass(frozen=True)
class HybridConfig(HybridFields):
    """The shape of a decoder-only model whose layers follow a pattern.

    Each layer is a norm and one mixer beside the residual stream: Mamba-2, attention, or a
    feed-forward layer (Waleffe et al. 2024, "An Empirical Study of Mamba-based Language Models").

    Raises:
        ConfigError: A value has the wrong type or range, or values do not fit together. The message
            names the fields and the values.
    """

    kind: ClassVar[str] = "hybrid"

    def _check(self) -> None:
        super()._check()
        hybrid_layers(self)

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns one trunk of embedding, layers and final norm, without a prefix."""
        embedding = self.component(EmbeddingSpec, is_output_weight=self.ties_output)
        norm = self.component(NormSpec)
        return {"": TrunkSpec(embedding, hybrid_layers(self), norm, self.hidden_size)}

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as a plain JSON value; the pattern without pipeline stages.

        Stages belong to a run. A checkpoint is read with any number of them.
        """
        return {**super().to_dict(), "hybrid_layer_pattern": self.pattern.layers}

    def stage_split(self, layout: ParallelLayout) -> tuple[range, ...] | None:
        """Returns the layers between the ``|`` of the pattern; None without any.

        Raises:
            ConfigError: The pattern has another number of stages than the layout.
        """
        stages, count = self.pattern.stages, layout.pp * layout.vpp
        if stages is not None and len(stages) != count:
            raise ConfigError(
                f"{{hybrid_layer_pattern:name}} has {len(stages)} pipeline stages, but the layout "
                f"has {count}; use {count - 1} times | or none",
                vars(self),
            )
        return stages

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses a layout that cannot cut a layer, or with other stages than the pattern."""
        super().check_layout(layout)
        self.stage_split(layout)
