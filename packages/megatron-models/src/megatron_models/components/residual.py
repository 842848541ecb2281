"""How sublayers stand beside the residual stream: placement of norms, parallel sublayers, factor.

Importing this module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_models.components.fields import flag
from megatron_models.components.layer import Layer, Sublayer
from megatron_models.components.mixer import Mixer
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.errors import ConfigError

NormPlacement = Literal["pre", "post", "sandwich", "sum"]
ParallelResidual = Literal["none", "two_norms", "shared_norm"]


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(NormConfig):
    """Placement of norms around each sublayer, parallel sublayers, and the factor of sublayers."""

    norm_placement: NormPlacement = field(
        default="pre",
        metadata=flag(
            "--norm-placement",
            "norms of each sublayer's input (pre), of its output before the addition (post, as in "
            "OLMo 2), of both (sandwich, as in Gemma 2), or of the residual stream after the "
            "addition, without a final norm (sum, the original transformer) (our name)",
            choices=get_args(NormPlacement),
        ),
    )
    parallel_residual: ParallelResidual = field(
        default="none",
        metadata=flag(
            "--parallel-residual",
            "attention and feed-forward layer read the same residual stream, each after its own "
            "norm (two_norms, as in GPT-NeoX) or after one (shared_norm, as in Falcon 7B) (our "
            "name)",
            choices=get_args(ParallelResidual),
        ),
    )
    residual_multiplier: float = field(
        default=1.0,
        metadata=flag(
            "--residual-multiplier",
            "factor of each sublayer's output before its addition to the residual stream (our "
            "name)",
            positive=True,
        ),
    )

    def _check(self) -> None:
        super()._check()
        if self.parallel_residual != "none" and self.norm_placement != "pre":
            raise ConfigError(
                "{parallel_residual} needs {norm_placement:name} 'pre', not {norm_placement:repr}",
                vars(self),
            )

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last layer."""
        return self.norm_placement != "sum"

    @property
    def has_sequential_sublayers(self) -> bool:
        """Whether the feed-forward layer reads the sum that attention was added to."""
        return self.parallel_residual == "none"

    @property
    def has_parallel_norms(self) -> bool:
        """Whether parallel sublayers have one norm each."""
        return self.parallel_residual == "two_norms"

    def residual_layer(self, parts: Sequence[tuple[str, Mixer, int]]) -> Layer:
        """Returns a layer of sublayers.

        Args:
            parts: Name, mixer and dropout site of each sublayer.
        """
        norm, where = self.component(NormSpec), self.norm_placement
        shared = self.parallel_residual == "shared_norm"
        return tuple(
            Sublayer(
                name,
                mixer,
                site,
                norm if where in ("pre", "sandwich") and not (index and shared) else None,
                norm if where in ("post", "sandwich") else None,
                norm if where == "sum" else None,
                multiplier=self.residual_multiplier,
                parallel=index > 0 and self.parallel_residual != "none",
                shares_norm=index > 0 and shared,
            )
            for index, (name, mixer, site) in enumerate(parts)
        )
