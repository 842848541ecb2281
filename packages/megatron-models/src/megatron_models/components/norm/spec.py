"""Normalization as plain data. Importing this module does not import torch."""

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from megatron_parallel import Sharding
from megatron_parallel.sharding import ONES, ZEROS

from megatron_models.components.fields import flag
from megatron_models.components.mixer import LayerPass, Parameters, ParameterSpec
from megatron_models.components.saved_bytes import SavedBytes
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError

_FP32: Final = 4

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
    apply_layernorm_1p: bool = field(
        default=False,
        metadata=flag(
            "--apply-layernorm-1p",
            "gains of norms stored as their difference from 1, which starts at 0 (Gemma)",
        ),
    )
    norm_bias: bool = field(
        default=True,
        metadata=flag("--no-norm-bias", "biases of LayerNorm (our name)"),
    )

    def _check(self) -> None:
        super()._check()
        if not self.norm_bias and self.normalization != "LayerNorm":
            raise ConfigError(
                "{norm_bias:name} has no effect with {normalization}, which has no bias; leave it "
                "out",
                vars(self),
            )


@dataclass(frozen=True)
class NormSpec(NormConfig):
    """LayerNorm, or RMSNorm without a bias, replicated on every rank."""

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the shardings of gain and bias.

        Under sequence parallelism a tensor-parallel rank normalizes only its part of the sequence,
        so its gradient is a partial sum over these ranks.
        """
        shape, partial = (self.hidden_size,), "tp" if sequence_parallel else None
        init = ZEROS if self.apply_layernorm_1p else ONES
        found = {"weight": Sharding(shape, init=init, partial=partial)}
        if self.normalization == "LayerNorm" and self.norm_bias:
            found["bias"] = Sharding(shape, init=ZEROS, partial=partial)
        return found

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns gain and bias, which have no multiply-adds."""
        cuts = self.shardings(sequence_parallel)
        return {name: ParameterSpec(sharding) for name, sharding in cuts.items()}

    def activation_bytes(self, layer_pass: LayerPass, *, shares_input: bool = False) -> int:
        """Returns the bytes saved for the backward pass.

        Args:
            layer_pass: The micro-batch, how it is cut, and the bytes that operations save.
            shares_input: Whether another norm saves the same input. Copies of it in another
                precision are each norm's own.
        """
        return self.saved(layer_pass.stream_tokens, layer_pass.saved_bytes, shares_input)

    def saved(self, rows: int, saved_bytes: SavedBytes, shares_input: bool = False) -> int:
        """Returns the bytes saved for ``rows`` vectors of ``hidden_size`` channels."""
        channels, norm_input, statistic = 0, saved_bytes.norm_input, saved_bytes.norm_statistic
        wide = max(saved_bytes.activation, _FP32)
        narrow = saved_bytes.activation < wide
        if self.apply_layernorm_1p and not (narrow and not saved_bytes.copies_for_gain):
            channels = 1  # computed in at least float32, with a gain of its own
            if narrow:
                norm_input, statistic = wide, wide if statistic else 0
                channels += "bias" in self.shardings()
        stream = rows * self.hidden_size
        statistics = 2 if self.normalization == "LayerNorm" else 1
        copied = norm_input > saved_bytes.activation
        of_input = 0 if shares_input and not copied else norm_input or saved_bytes.activation
        saved = stream * of_input
        saved += stream * saved_bytes.normalized_input
        saved += channels * self.hidden_size * wide
        return saved + rows * statistic * statistics
