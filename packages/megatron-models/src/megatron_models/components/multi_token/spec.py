"""Multi-token prediction as plain data. Importing this module does not import torch."""

from dataclasses import dataclass

from megatron_parallel import ParallelLayout, Sharding
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec

from megatron_models.components.fields import check_divisible
from megatron_models.components.layer import Layer, TrunkSpec, layer_parameters
from megatron_models.components.mixer import (
    BytesByPart,
    Feature,
    LayerPass,
    Parameters,
    UnsupportedFeature,
    parameters_of,
    prefixed,
)
from megatron_models.components.multi_token.config import MultiTokenConfig
from megatron_models.components.norm.spec import NormSpec

_NOT_COMPILED = (
    "attaches losses inside the model, which compiled code cannot; leave one of them out"
)


def multi_token_loss(depth: int) -> str:
    """Returns the name of the loss of a depth, counted from 0; Megatron-LM counts from 1."""
    return f"mtp_{depth + 1} loss"


@dataclass(frozen=True)
class MultiTokenSpec:
    """One depth of multi-token prediction.

    Depth ``k`` maps the stream of depth ``k - 1`` and the embeddings of the tokens ``k`` later
    to its own stream:
    ``final_norm(layer(eh_proj(concat(enorm(embedding), hnorm(stream)))))``. The stream of depth 0
    is that of the model after its final norm. Embedding and output layer are those of the model.

    Attributes:
        config: Width, initial values, and the weight of the loss.
        depth: The depth, counted from 0.
        layer: The transformer layer, which equals the model's last one.
        norm: Type of the three norms.
    """

    config: MultiTokenConfig
    depth: int
    layer: Layer
    norm: NormSpec

    @property
    def number(self) -> int:
        """Number of the layer for dropout and attention, after those of the model."""
        return self.config.num_layers + self.depth

    @property
    def projection(self) -> ColumnSpec:
        """The projection ``[h, 2h]``, first of the embedding, then of the stream."""
        init = Init(scale=self.config.init_method_std)
        width = self.config.hidden_size
        return ColumnSpec(2 * width, (width,), bias=False, init=init, role="eh_proj")

    @property
    def trunk(self) -> TrunkSpec:
        """The layer alone, as a trunk without embedding and norm."""
        return TrunkSpec(None, {self.number: self.layer}, None, self.config.hidden_size)

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns all parameters by name, in the order of the module."""
        norm = self.norm.parameters(sequence_parallel)
        return {
            **prefixed("enorm", norm),
            **prefixed("hnorm", norm),
            **prefixed("eh_proj", parameters_of(self.projection, sequence_parallel)),
            **prefixed("layer", layer_parameters(self.layer, sequence_parallel)),
            **prefixed("final_norm", norm),
        }

    def state(self) -> dict[str, Sharding]:
        """Returns the layer's state that is not a parameter, by name."""
        return {
            f"layer.{name}": cut
            for sublayer in self.layer
            for name, cut in sublayer.state().items()
        }

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the bytes that one micro-batch saves, by submodule, without the output layer."""
        plan = layer_pass.recompute
        saved_bytes, stream = (
            layer_pass.saved_bytes,
            layer_pass.stream_tokens * self.norm.hidden_size,
        )
        tokens = {"tokens": 8 * layer_pass.tokens}
        if plan.granularity == "full" and plan.method == "uniform":
            cut = layer_pass.tp if plan.distribute_saved_activations else 1
            return {**tokens, "inputs": 2 * stream // cut * saved_bytes.activation}
        norm = self.norm.activation_bytes(layer_pass)
        own = {
            **tokens,
            "enorm": norm,
            "hnorm": norm,
            "eh_proj": 2 * stream * saved_bytes.activation,
            "final_norm": norm,
        }
        layer = self.trunk.layer_activations(self.number, layer_pass)
        return {**own, **{f"layer.{name}": size for name, size in layer.items()}}

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses a tensor-parallel size that does not divide the outputs of the projection."""
        check_divisible(self.config, "hidden_size", "tp", layout.tp, "the outputs of eh_proj, ")

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns that compilation is not supported."""
        if feature != "compile":
            return None
        return UnsupportedFeature("{mtp_num_layers}", _NOT_COMPILED)
