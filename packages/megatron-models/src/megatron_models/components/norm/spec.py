"""Normalization as plain data. Importing this module does not import torch."""

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
    """Type and epsilon of normalization, the same in the whole model."""

    normalization: Normalization = field(
        default="LayerNorm",
        metadata=flag(
            "--normalization",
            "normalization before attention, before the feed-forward layer and at the end",
            choices=get_args(Normalization),
        ),
    )
    norm_epsilon: float = field(
        default=1e-05,
        metadata=flag("--norm-epsilon", "added to the variance in normalization", positive=True),
    )


@dataclass(frozen=True, kw_only=True)
class NormSpec(NormConfig):
    """LayerNorm, or RMSNorm without a bias, replicated on every rank."""

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the shardings of gain and bias.

        Under sequence parallelism a tensor-parallel rank normalizes only its part of the sequence,
        so its gradient is a partial sum over these ranks.
        """
        shape, partial = (self.hidden_size,), "tp" if sequence_parallel else None
        found = {"weight": Sharding(shape, init=ONES, partial=partial)}
        if self.normalization == "LayerNorm":
            found["bias"] = Sharding(shape, init=ZEROS, partial=partial)
        return found

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns gain and bias, which have no multiply-adds."""
        cuts = self.shardings(sequence_parallel)
        return {name: ParameterSpec(sharding) for name, sharding in cuts.items()}

    def activation_bytes(self, layer_pass: LayerPass) -> int:
        """Returns the bytes saved for the backward pass."""
        saved_bytes = layer_pass.saved_bytes
        stream = layer_pass.stream_tokens * self.hidden_size
        statistics = 2 if self.normalization == "LayerNorm" else 1
        saved = (
            stream * (saved_bytes.norm_input or saved_bytes.activation)
            + stream * saved_bytes.normalized_input
        )
        return saved + layer_pass.stream_tokens * saved_bytes.norm_statistic * statistics
