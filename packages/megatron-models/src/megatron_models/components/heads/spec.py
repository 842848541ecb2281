"""Heads of whole sequences as plain data. Importing this module does not import torch."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ReplicatedSpec

from megatron_models.components.head import Head
from megatron_models.components.mixer import LayerPass, Parameters, parameters_of, prefixed
from megatron_models.components.stream import StreamConfig

SEQUENCE_HEAD: Final = "sequence_head"
"""Prefix of the parameters of a head of whole sequences."""

Pooling = Literal["first", "last", "mean"]
"""Which tokens of a sequence a head reads: the first, the last that is no padding, or the mean of
all that are no padding."""


@dataclass(frozen=True, kw_only=True)
class SequenceHeadSpec(StreamConfig, Head):
    """``out(tanh(pooler(pool(x))))``; pooler and output are optional.

    Every rank holds the head and computes the same, since it works on one vector a sequence.

    Attributes:
        pooling: Which tokens are read.
        has_pooler: Whether a linear layer ``[h, h]`` and tanh follow (Devlin et al. 2019).
        outputs: Width of the output; 0: no output layer.
        has_output_bias: Whether the output layer has a bias.
        normalizes: Whether the result is divided by its Euclidean norm.
        drops: Whether hidden dropout is applied before the output layer.
    """

    pooling: Pooling
    has_pooler: bool = False
    outputs: int = 0
    has_output_bias: bool = True
    normalizes: bool = False
    drops: bool = False

    @property
    def pooler(self) -> ReplicatedSpec | None:
        """The pooler's linear layer, or None."""
        return self._linear(self.hidden_size) if self.has_pooler else None

    @property
    def out(self) -> ReplicatedSpec | None:
        """The output layer, or None."""
        return self._linear(self.outputs, self.has_output_bias) if self.outputs else None

    def _linear(self, width: int, bias: bool = True) -> ReplicatedSpec:
        init = Init(scale=self.init_method_std)
        return ReplicatedSpec(self.hidden_size, width, bias, init=init)

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters; a sequence does one multiply-add per weight element."""
        del sequence_parallel  # every rank has the pooled vectors of all sequences
        found: Parameters = {}
        for name, linear in (("pooler", self.pooler), ("out", self.out)):
            if linear is not None:
                found |= prefixed(name, parameters_of(linear, False))
        return {name: replace(spec, per_sequence=True) for name, spec in found.items()}

    def shared_parameters(self, other: Head | None) -> frozenset[str]:
        """Returns the parameters of the pooler, and of the output layer if the heads are equal."""
        shared = super().shared_parameters(other)
        if not isinstance(other, SequenceHeadSpec) or self.pooler is None:
            return shared
        names = parameters_of(self.pooler, False) if self.pooler == other.pooler else {}
        return shared | {f"pooler.{name}" for name in names}

    def activation_bytes(self, layer_pass: LayerPass) -> int:
        """Returns the bytes of one vector for the pooler, for tanh and for the output layer."""
        vectors = self.has_pooler + (self.outputs > 0 or self.has_pooler) + self.normalizes
        saved = layer_pass.saved_bytes
        weights = layer_pass.stream_tokens * max(saved.activation, 4)
        return weights + vectors * layer_pass.micro_batch_size * self.hidden_size * saved.activation
