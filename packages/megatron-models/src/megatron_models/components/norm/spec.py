"""Normalisation as plain data. Importing this module does not import torch."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_parallel import Sharding
from megatron_parallel.sharding import ONES, ZEROS

from megatron_models.components.fields import flag
from megatron_models.components.mixer import LayerPass, Parameters, ParameterSpec
from megatron_models.components.stream import StreamConfig

Normalization = Literal["LayerNorm", "RMSNorm"]


@dataclass(frozen=True, kw_only=True)
class NormConfig(StreamConfig):
    """Which normalisation, the same in the whole model."""

    normalization: Normalization = field(
        default="LayerNorm",
        metadata=flag(
            "--normalization",
            "normalisation before attention, before the feed-forward layer and at the end",
            choices=get_args(Normalization),
        ),
    )
    norm_epsilon: float = field(
        default=1e-05,
        metadata=flag("--norm-epsilon", "added to the variance in normalisation", positive=True),
    )


@dataclass(frozen=True, kw_only=True)
class NormSpec(NormConfig):
    """LayerNorm, or RMSNorm without a bias; every rank holds all of it."""

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns how gain and bias are held.

        Under sequence parallelism a tensor-parallel rank normalises its part of the sequence only,
        so that its gradient is a part of the sum over those ranks.
        """
        shape, partial = (self.hidden_size,), "tp" if sequence_parallel else None
        found = {"weight": Sharding(shape, init=ONES, partial=partial)}
        if self.normalization == "LayerNorm":
            found["bias"] = Sharding(shape, init=ZEROS, partial=partial)
        return found

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns gain and bias, which no token is multiplied with as with a matrix."""
        cuts = self.shardings(sequence_parallel)
        return {name: ParameterSpec(sharding) for name, sharding in cuts.items()}

    def activation_bytes(self, layer_pass: LayerPass) -> int:
        """Returns the bytes that it keeps for its backward pass."""
        saved_bytes = layer_pass.saved_bytes
        stream = layer_pass.stream_tokens * self.hidden_size
        statistics = 2 if self.normalization == "LayerNorm" else 1
        kept = (
            stream * (saved_bytes.norm_input or saved_bytes.activation)
            + stream * saved_bytes.normalized_input
        )
        return kept + layer_pass.stream_tokens * saved_bytes.norm_statistic * statistics
