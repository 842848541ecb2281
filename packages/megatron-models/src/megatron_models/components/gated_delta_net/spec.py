"""A gated delta net as plain data. Importing this module does not import torch."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from megatron_parallel import ParallelLayout, Sharding
from megatron_parallel.sharding import ONES, Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, RowSpec

from megatron_models.components.attention.qk_norm_spec import QKNormSpec
from megatron_models.components.fields import check_divisible
from megatron_models.components.gated_delta_net.config import GatedDeltaNetConfig
from megatron_models.components.mixer import (
    BytesByPart,
    Feature,
    LayerPass,
    Mixer,
    Parameters,
    ParameterSpec,
    StateSpec,
    StateTensor,
    UnsupportedFeature,
    parameters_of,
    prefixed,
)
from megatron_models.components.norm.spec import NormConfig
from megatron_models.errors import ConfigError

_FP32: Final = 4
_LARGEST_DECAY: Final = 16.0
_ONE_RANK: Final = "passes a state through whole documents; leave one of them out"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec(GatedDeltaNetConfig, NormConfig, Mixer):
    """A gated delta net (Yang et al. 2024): projection, convolution, delta rule, gated norm.

    The rows of the fused projection ``(g, width, h)`` are, for each key head, its query, its key,
    the values of the value heads that it serves, their output gates, and for each of them the
    logits of beta and of the decay. The convolution ``(g, channels, k)`` has those of query, key
    and values. A value head decays by ``exp(-exp(A_log) softplus(logit + dt_bias))``.

    No linear layer has a bias. The norm of each value head is RMSNorm with a gain of its own.
    """

    module: ClassVar[str] = "megatron_models.components.gated_delta_net.module:GatedDeltaNet"
    recurrent: ClassVar[bool] = True

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of the projection for one key head: query, key, values, gates, beta, decay."""
        key, values = self.linear_key_head_dim, self.linear_group_value_size
        served = self.linear_value_heads_per_key
        return (key, key, values, values, served, served)

    @property
    def in_proj(self) -> ColumnSpec:
        """The fused projection of the token."""
        return ColumnSpec(
            self.hidden_size,
            (self.linear_num_key_heads, sum(self.widths)),
            False,
            init=Init(scale=self.init_method_std),
            role="in_proj",
            fused_sizes=self.widths,
        )

    @property
    def out_proj(self) -> RowSpec:
        """The output projection, back to the residual stream."""
        init = Init(scale=self.output_std)
        return RowSpec(self.linear_value_size, self.hidden_size, False, init=init, role="out_proj")

    @property
    def norm(self) -> QKNormSpec:
        """The norm of each value head, whose gain all heads share."""
        return self.component(
            QKNormSpec,
            hidden_size=self.linear_value_head_dim,
            normalization="RMSNorm",
            apply_layernorm_1p=False,
            norm_bias=True,
        )

    def own(self) -> dict[str, Sharding]:
        """Returns the shardings of convolution, decay and its bias, cut by heads.

        The convolution starts like `torch.nn.Conv1d`, the decay as in Megatron-Core.
        """
        taps, heads = self.linear_conv_kernel_dim, (self.linear_num_value_heads,)
        filters = (self.linear_num_key_heads, self.linear_group_conv_size, taps)
        near = Init("uniform", taps**-0.5)
        return {
            "conv_weight": Sharding(filters, "tp", 0, init=near, vector=True, weight_decay=True),
            "A_log": Sharding(heads, "tp", 0, init=Init("log_uniform", _LARGEST_DECAY, 1.0)),
            "dt_bias": Sharding(heads, "tp", 0, init=ONES),
        }

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of projections, convolution, decay and norm."""
        own = {name: ParameterSpec(sharding) for name, sharding in self.own().items()}
        own["conv_weight"] = replace(own["conv_weight"], multiply_adds=own["conv_weight"].numel)
        return {
            **own,
            **prefixed("in_proj", parameters_of(self.in_proj, sequence_parallel)),
            **prefixed("norm", self.norm.parameters(sequence_parallel)),
            **prefixed("out_proj", parameters_of(self.out_proj, sequence_parallel)),
        }

    def cached(self, tp: int) -> StateSpec:
        """Returns the last inputs of the convolution, and the state of each value head."""
        keys, values = self.linear_num_key_heads // tp, self.linear_num_value_heads // tp
        window = (self.linear_conv_kernel_dim - 1, keys * self.linear_group_conv_size)
        state = (values, self.linear_key_head_dim, self.linear_value_head_dim)
        return StateSpec((("conv", StateTensor(window)), ("delta", StateTensor(state, True))))

    def multiply_adds_of_state(self) -> int:
        """Returns the terms of Megatron-Core: decay, recall, correction and reading of a state."""
        state = self.linear_key_head_dim * self.linear_value_head_dim
        return 4 * self.linear_num_value_heads * state

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the saved bytes. The delta rule saves its inputs only, and is recomputed."""
        saved_bytes, tokens, tp = layer_pass.saved_bytes, layer_pass.tokens, layer_pass.tp
        size, wide = saved_bytes.activation, max(saved_bytes.activation, _FP32)
        keys, heads = self.linear_num_key_heads // tp, self.linear_num_value_heads // tp
        values = self.linear_value_size // tp
        found = {"out_proj": saved_bytes.of_linear(tokens * values)}
        if layer_pass.recompute.selects("core_attn"):
            return {"": tokens * keys * sum(self.widths) * size, **found}
        before = (self.linear_conv_kernel_dim - 1) * layer_pass.micro_batch_size
        # Inputs of the convolution, its outputs, and their activations.
        own = (before + 3 * tokens) * keys * self.linear_group_conv_size * size
        # A copy of the values, the normed outputs, and the gates with their activations.
        own += tokens * values * 2 * (size + wide)
        # Beta, the decay with the two factors of its logarithm, and two results for each head.
        own += (4 * tokens + 2) * heads * wide
        return {"": own, "norm": self.norm.saved(tokens * heads, saved_bytes), **found}

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the fused projection."""
        return "in_proj"

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns that ranks cannot share documents, whose parts would need one another's state."""
        if feature != "document_pool":
            return None
        return UnsupportedFeature("{linear_num_key_heads:name}", _ONE_RANK)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses tensor-parallel sizes that do not divide the key heads, and context parallelism.

        Raises:
            ConfigError: The layout cannot cut a gated delta net.
        """
        check_divisible(self, "linear_num_key_heads", "tp", layout.tp)
        if layout.cp > 1:
            raise ConfigError(
                "{cp} cannot cut a gated delta net, whose state passes from token to token; use "
                "{cp:name} 1",
                {**vars(self), "cp": layout.cp},
            )
