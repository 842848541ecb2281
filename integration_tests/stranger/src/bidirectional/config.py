"""The encoder's configuration and the description of its attention. Does not import torch."""

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
    """Attention heads, whose sizes add up to the hidden size."""

    num_attention_heads: int = field(
        metadata=flag("--num-attention-heads", "number of heads", positive=True, small=4)
    )
    center_inputs: bool = field(
        default=False,
        metadata=flag("--center-inputs", "subtract the running mean from the input of attention"),
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
        """Dimension of a head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class BidirectionalSpec(HeadsConfig, Mixer):
    """Bidirectional self-attention with separate projections for q, k and v."""

    module: ClassVar[str] = "bidirectional.mixer:Bidirectional"
    bidirectional: ClassVar[bool] = True

    @property
    def input_projection(self) -> ColumnSpec:
        """The projection to queries, keys or values; its weight is ``[n, d, h]``."""
        rows = (self.num_attention_heads, self.head_size)
        return ColumnSpec(self.hidden_size, rows, init=Init(scale=self.init_method_std))

    @property
    def output_projection(self) -> RowSpec:
        """The projection of the output to the hidden size."""
        return RowSpec(self.hidden_size, self.hidden_size, init=Init(scale=self.output_std))

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of the four projections."""
        parameters: Parameters = {}
        for name in ("q", "k", "v"):
            parameters |= prefixed(name, parameters_of(self.input_projection, sequence_parallel))
        return parameters | prefixed(
            "out", parameters_of(self.output_projection, sequence_parallel)
        )

    def state(self) -> dict[str, Sharding]:
        """Returns the sharding of the running mean ``[h]``, if it is used: a copy on every rank."""
        if not self.center_inputs:
            return {}
        return {"center.mean": Sharding((self.hidden_size,), reduce="sum", init=ZEROS)}

    def multiply_adds_per_pair(self) -> int:
        """Returns one multiply-add for each channel of the score and of the value."""
        return 2 * self.hidden_size

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the bytes of q, k, v and the output; fused attention does not save scores."""
        width = (
            layer_pass.tokens
            * self.hidden_size
            // layer_pass.tp
            * layer_pass.saved_bytes.activation
        )
        heads = layer_pass.tokens * self.num_attention_heads // layer_pass.tp
        return {"": 3 * width + heads * layer_pass.saved_bytes.logsumexp, "out": width}

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the projection to queries."""
        return "q"

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses a tensor-parallel size that does not divide the number of heads."""
        check_divisible(self, "num_attention_heads", "tp", layout.tp)


@dataclass(frozen=True, kw_only=True)
class BidirectionalConfig(ModelConfig, MLPConfig, NormConfig, HeadsConfig, EmbeddingConfig):
    """An encoder with post-LN layers and embeddings of tokens, positions and segments."""

    kind: ClassVar[str] = "bidirectional"

    num_segments: int = field(
        default=2, metadata=flag("--num-segments", "number of segment ids", positive=True)
    )
    masked_lm_head: bool = field(
        default=False,
        metadata=flag("--masked-lm-head", "add an output layer that predicts masked tokens"),
    )

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns embedding and layers; each norm follows the residual sum."""
        norm = self.component(NormSpec)
        attention, mlp = self.component(BidirectionalSpec), self.component(MLPSpec)
        layer = (
            Sublayer("attention", attention, ATTENTION_OUTPUT, norm_sum=norm),
            Sublayer("mlp", mlp, MLP_OUTPUT, norm_sum=norm),
        )
        layers = dict.fromkeys(range(self.num_layers), layer)
        return {"": TrunkSpec(self.component(EmbeddingSpec), layers, None, self.hidden_size)}

    def output(self) -> EmbeddingConfig | None:
        """Returns this configuration if the model has an output layer, else None."""
        return self if self.masked_lm_head else None

    def extra_shardings(self) -> dict[str, Sharding]:
        """Returns the sharding of segments and pooler: a copy on every rank."""
        width, init = self.hidden_size, Init(scale=self.init_method_std)
        zero = Init("constant", 0.0)
        return {
            "segments.weight": Sharding((self.num_segments, width), init=init),
            "pooler.weight": Sharding((width, width), init=init),
            "pooler.bias": Sharding((width,), init=zero, weight_decay=False),
        }

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns every parameter by its global name."""
        extra = {name: ParameterSpec(sharding) for name, sharding in self.extra_shardings().items()}
        norm = prefixed("embedding_norm", self.component(NormSpec).parameters())
        return super().parameters(sequence_parallel) | norm | extra
