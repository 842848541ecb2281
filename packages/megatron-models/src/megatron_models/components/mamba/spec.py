"""A Mamba-2 layer as plain data. Importing this module does not import torch."""

import math
from dataclasses import dataclass
from typing import ClassVar, Final

from megatron_parallel import ParallelLayout, Sharding
from megatron_parallel.nearest import nearest_divisors
from megatron_parallel.sharding import ONES, Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, RowSpec

from megatron_models.components.fields import check_divisible
from megatron_models.components.mamba.config import MambaConfig
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

DECAYS: Final = Init("log_uniform", 16.0, low=1.0)
STEPS: Final = Init("inverse_softplus", 0.1, low=1e-3)
"""Initial rates of decay and time steps, as in Mamba-2 and Megatron-LM."""


@dataclass(frozen=True)
class MambaSpec(MambaConfig, NormConfig, Mixer):
    """Projection, causal convolution, scan, gated norm and output projection (Dao and Gu, 2024).

    The rows of the fused weight ``(g, 2 m d + 2 k + m, h)`` are, for each group of ``m`` heads: the
    gates of its heads, their values, what is written to the state (B), how it is read (C), and the
    time steps of its heads. Tensor parallelism cuts whole groups.
    """

    module: ClassVar[str] = "megatron_models.components.mamba.module:Mamba"
    recurrent: ClassVar[bool] = True

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of a group in the fused projection: gates, convolved channels, time steps."""
        return self.mamba_group_width, self.mamba_conv_width, self.mamba_heads_per_group

    @property
    def dt_limits(self) -> tuple[float, float]:
        """Smallest and largest time step."""
        return self.mamba_dt_min, self.mamba_dt_max or math.inf

    @property
    def in_proj(self) -> ColumnSpec:
        """The fused projection."""
        return ColumnSpec(
            self.hidden_size,
            (self.mamba_num_groups, sum(self.widths)),
            self.mamba_proj_bias,
            init=Init(scale=self.init_method_std),
            role="in_proj",
            fused_sizes=self.widths,
        )

    @property
    def out_proj(self) -> RowSpec:
        """The projection back to the residual stream."""
        init = Init(scale=self.output_std)
        width, bias = self.mamba_inner_size, self.mamba_proj_bias
        return RowSpec(width, self.hidden_size, bias, init=init, role="out_proj")

    def conv(self) -> dict[str, Sharding]:
        """Returns filters ``[g, channels, taps]`` and bias ``[g, channels]`` of the convolution."""
        rows = (self.mamba_num_groups, self.mamba_conv_width)
        init = Init("uniform", self.mamba_conv_kernel**-0.5)
        shape = (*rows, self.mamba_conv_kernel)
        found = {"weight": Sharding(shape, "tp", 0, weight_decay=True, init=init, vector=True)}
        if self.mamba_conv_bias:
            found["bias"] = Sharding(rows, "tp", 0, init=init, vector=True)
        return found

    def scan(self) -> dict[str, Sharding]:
        """Returns rates of decay, factors of the values and biases of time steps, all ``[n]``."""
        inits = {"A_log": DECAYS, "D": ONES, "dt_bias": STEPS}
        shape = (self.mamba_num_heads,)
        return {name: Sharding(shape, "tp", 0, init=init) for name, init in inits.items()}

    def norm(self) -> dict[str, Sharding]:
        """Returns the gain of the gated norm ``[g, m d]``."""
        shape = (self.mamba_num_groups, self.mamba_group_width)
        return {"weight": Sharding(shape, "tp", 0, init=ONES, vector=True)}

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of projections, convolution, scan and norm."""
        conv = {
            name: ParameterSpec(cut, math.prod(cut.shape) if name == "weight" else 0)
            for name, cut in self.conv().items()
        }
        scan = {name: ParameterSpec(cut) for name, cut in self.scan().items()}
        norm = {name: ParameterSpec(cut) for name, cut in self.norm().items()}
        return {
            **scan,
            **prefixed("in_proj", parameters_of(self.in_proj, sequence_parallel)),
            **prefixed("conv", conv),
            **prefixed("norm", norm),
            **prefixed("out_proj", parameters_of(self.out_proj, sequence_parallel)),
        }

    def cached(self, tp: int) -> StateSpec:
        """Returns the last inputs of the convolution and the state of one rank's heads."""
        groups = self.mamba_num_groups // tp
        state = (groups * self.mamba_heads_per_group, self.mamba_head_dim, self.mamba_state_dim)
        return StateSpec(
            (
                (
                    "conv",
                    StateTensor((self.mamba_conv_kernel - 1, groups * self.mamba_conv_width)),
                ),
                ("scan", StateTensor(state, precise=True)),
            )
        )

    def multiply_adds_of_state(self) -> int:
        """Returns those of the recurrence: a state is decayed, written and read."""
        return 3 * self.mamba_inner_size * self.mamba_state_dim

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the saved bytes. All between the projections is recomputed."""
        each, saved_bytes = layer_pass.tokens // layer_pass.tp, layer_pass.saved_bytes
        return {
            "": each * saved_bytes.activation * self.mamba_num_groups * sum(self.widths),
            "out_proj": saved_bytes.of_linear(each * self.mamba_inner_size),
        }

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the fused projection."""
        return "in_proj"

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses sizes that do not divide the groups.

        A context-parallel rank computes the whole sequence of some groups.

        Raises:
            ConfigError: The groups do not divide over the ranks.
        """
        check_divisible(self, "mamba_num_groups", "tp", layout.tp)
        own = self.mamba_num_groups // layout.tp
        if own % layout.cp:
            raise ConfigError(
                "{cp} cannot cut the "
                f"{own} of {{mamba_num_groups}} that {{tp}} leaves on a rank; use {{cp:name}} "
                f"{nearest_divisors(own, layout.cp)}",
                {**vars(self), "tp": layout.tp, "cp": layout.cp},
            )

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns why documents cannot be divided over a pool of ranks."""
        if feature != "document_pool":
            return None
        return UnsupportedFeature(
            "{mamba_num_groups}",
            "a Mamba layer passes its state through the whole sequence; use context parallelism",
        )
