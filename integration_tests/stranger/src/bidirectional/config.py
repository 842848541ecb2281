"""The encoder's configuration, and its attention as plain data. No torch."""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_models.components.dropout_sites import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron_models.components.embedding.spec import EmbeddingConfig, EmbeddingSpec
from megatron_models.components.fields import check_divisible, flag
from megatron_models.components.layer import Sublayer, TrunkSpec
from megatron_models.components.mixer import (
    BytesByPart,
    LayerPass,
    Mixer,
    Parameters,
    ParameterSpec,
    parameters_of,
    prefixed,
)
from megatron_models.components.mlp.spec import MLPConfig, MLPSpec
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError
from megatron_models.models.model_config import ModelConfig
from megatron_parallel import ParallelLayout, Sharding
from megatron_parallel.sharding import ZEROS, Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, RowSpec


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(StreamConfig):
    """Heads of attention in both directions, as wide together as the stream."""

    num_attention_heads: int = field(
        metadata=flag("--num-attention-heads", "number of heads", positive=True)
    )
    center_inputs: bool = field(
        default=False,
        metadata=flag("--center-inputs", "attention reads the stream without its running mean"),
    )

    def _check(self) -> None:
        super()._check()
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "{hidden_size} is not a multiple of {num_attention_heads}; change one of them",
                vars(self),
            )

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class BidirectionalSpec(HeadsConfig, Mixer):
    """Attention of every token to every other, with a projection each for q, k and v."""

    module: ClassVar[str] = "bidirectional.mixer:Bidirectional"
    bidirectional: ClassVar[bool] = True

    @property
    def read(self) -> ColumnSpec:
        """Each of the projections to queries, keys and values, ``(n, d, h)``."""
        rows = (self.num_attention_heads, self.head_size)
        return ColumnSpec(self.hidden_size, rows, init=Init(scale=self.init_method_std))

    @property
    def out(self) -> RowSpec:
        """The projection back to the residual stream."""
        return RowSpec(self.hidden_size, self.hidden_size, init=Init(scale=self.output_std))

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Return the four projections."""
        found: Parameters = {}
        for name in ("q", "k", "v"):
            found |= prefixed(name, parameters_of(self.read, sequence_parallel))
        return found | prefixed("out", parameters_of(self.out, sequence_parallel))

    def state(self) -> dict[str, Sharding]:
        """Return how the running mean ``[h]`` is held, if there is one: by every rank."""
        if not self.center_inputs:
            return {}
        return {"center.mean": Sharding((self.hidden_size,), reduce="sum", init=ZEROS)}

    def multiply_adds_per_pair(self) -> int:
        """Return a multiply-add of each channel for the score, and one for the value."""
        return 2 * self.hidden_size

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Return queries, keys, values and the output; scores of fused attention are not kept."""
        width = (
            layer_pass.tokens
            * self.hidden_size
            // layer_pass.tp
            * layer_pass.saved_bytes.activation
        )
        heads = layer_pass.tokens * self.num_attention_heads // layer_pass.tp
        return {"": 3 * width + heads * layer_pass.saved_bytes.logsumexp, "out": width}

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Return the projection to queries."""
        return "q"

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuse tensor-parallel ranks that cannot share out the heads."""
        check_divisible(self, "num_attention_heads", "tp", layout.tp)


@dataclass(frozen=True, kw_only=True)
class BidirectionalConfig(ModelConfig, MLPConfig, NormConfig, HeadsConfig, EmbeddingConfig):
    """The shape of an encoder: post-LN layers, embeddings of tokens, positions and segments."""

    kind: ClassVar[str] = "bidirectional"

    num_segments: int = field(
        default=2, metadata=flag("--num-segments", "kinds of tokens in a text", positive=True)
    )
    masked_lm_head: bool = field(
        default=False,
        metadata=flag("--masked-lm-head", "an output layer that predicts hidden tokens"),
    )

    def trunks(self) -> dict[str, TrunkSpec]:
        """Return embedding and layers; every norm is of a sum."""
        norm = self.component(NormSpec)
        attention, mlp = self.component(BidirectionalSpec), self.component(MLPSpec)
        layer = (
            Sublayer("attention", attention, ATTENTION_OUTPUT, norm_sum=norm),
            Sublayer("mlp", mlp, MLP_OUTPUT, norm_sum=norm),
        )
        layers = dict.fromkeys(range(self.num_layers), layer)
        return {"": TrunkSpec(self.component(EmbeddingSpec), layers, None, self.hidden_size)}

    def output(self) -> EmbeddingConfig | None:
        """Return this configuration if the model has an output layer."""
        return self if self.masked_lm_head else None

    def beside(self) -> dict[str, Sharding]:
        """Return how segments and the pooler are held: by every rank."""
        width, init = self.hidden_size, Init(scale=self.init_method_std)
        zero = Init("constant", 0.0)
        return {
            "segments.weight": Sharding((self.num_segments, width), init=init),
            "pooler.weight": Sharding((width, width), init=init),
            "pooler.bias": Sharding((width,), init=zero, weight_decay=False),
        }

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Return every parameter by its global name."""
        beside = {name: ParameterSpec(cut) for name, cut in self.beside().items()}
        norm = prefixed("embedding_norm", self.component(NormSpec).parameters())
        return super().parameters(sequence_parallel) | norm | beside
