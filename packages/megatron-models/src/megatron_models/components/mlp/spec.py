"""The dense feed-forward layer as plain data. Importing this module does not import torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, get_args

from megatron_parallel import ParallelLayout
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, RowSpec

from megatron_models.components.fields import check_divisible, flag
from megatron_models.components.mixer import (
    BytesByPart,
    LayerPass,
    Mixer,
    Parameters,
    parameters_of,
    prefixed,
)
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError

Activation = Literal[
    "gelu",
    "gelu_tanh",
    "relu",
    "squared_relu",
    "silu",
    "quick_gelu",
    "swiglu",
    "geglu",
    "geglu_tanh",
    "quick_geglu",
    "reglu",
]
Gate = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
GATES: Final[Mapping[str, Gate]] = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
    "reglu": "relu",
}
"""The activation of the gate of each gated unit (Shazeer, 2020)."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig(StreamConfig):
    """Width, activation and biases of feed-forward layers.

    ``ffn_hidden_size`` may be left at 0. It is then derived when the configuration is created.
    """

    ffn_hidden_size: int = field(
        default=0,
        metadata=flag(
            "--ffn-hidden-size",
            "width of the feed-forward layer; 0: 4 x hidden_size, or with a gated activation two "
            "thirds of it rounded down to a multiple of 64",
            positive=True,
            derived=True,
            unit="channels",
            small=40,
        ),
    )
    activation: Activation = field(
        default="gelu",
        metadata=flag(
            "--activation",
            "feed-forward activation: exact GELU or an approximation (tanh, quick), ReLU, its "
            "square, SiLU, or a unit that is gated by one of them (swiglu, geglu, ..., reglu)",
            choices=get_args(Activation),
        ),
    )
    activation_func_clamp_value: float = field(
        default=0.0,
        metadata=flag(
            "--activation-func-clamp-value",
            "gated units: maximum of the gate and of the magnitude of what it multiplies, with a "
            "gradient of 1 at the maximum itself on every torch; 0: none (gpt-oss has 7)",
            nonnegative=True,
        ),
    )
    glu_linear_offset: float = field(
        default=0.0,
        metadata=flag(
            "--glu-linear-offset",
            "gated units: added to what the gate multiplies (gpt-oss has 1)",
        ),
    )
    add_mlp_bias: bool = field(
        default=False,
        metadata=flag(
            "--add-mlp-bias",
            "biases in feed-forward layers and experts even without add_bias_linear (our name)",
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        width = 4 * self.hidden_size
        if self.gated:
            width = max(64, int(4 * self.hidden_size * 2 / 3) // 64 * 64)
        self._set("ffn_hidden_size", width)

    def _check(self) -> None:
        super()._check()
        if not math.isfinite(self.glu_linear_offset):
            raise ConfigError(
                "{glu_linear_offset:name} must be a finite number, not {glu_linear_offset:repr}; "
                "the default is 0.0",
                vars(self),
            )
        for name in ("activation_func_clamp_value", "glu_linear_offset"):
            if getattr(self, name) and not self.gated:
                raise ConfigError(
                    f"{{{name}}} needs a gated activation ({', '.join(GATES)}), not "
                    "{activation:repr}",
                    vars(self),
                )

    @property
    def has_mlp_bias(self) -> bool:
        """Whether feed-forward layers and experts have biases."""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer is gated, so that its first matrix is doubled."""
        return self.activation in GATES

    @property
    def activation_saves(self) -> int:
        """Widths that the activation saves, besides its result: the next projection saves that.

        ReLU saves its result alone. Gated units save both their inputs.
        """
        if self.gated:
            return 2
        return 0 if self.activation == "relu" else 1


@dataclass(frozen=True)
class MLPSpec(MLPConfig, Mixer):
    """``down(activation(up(x)))``. If gated, ``up`` is gate and up projection, ``(2, f, h)``."""

    module: ClassVar[str] = "megatron_models.components.mlp.module:MLP"
    recompute_name: ClassVar[str | None] = "mlp"

    @property
    def up(self) -> ColumnSpec:
        """The projection to the feed-forward width."""
        width, init = self.ffn_hidden_size, Init(scale=self.init_method_std)
        rows, cut, fused = ((2, width), 1, 0) if self.gated else ((width,), 0, None)
        return ColumnSpec(
            self.hidden_size,
            rows,
            self.has_mlp_bias,
            dim=cut,
            fused_dim=fused,
            init=init,
            role="linear_fc1",
        )

    @property
    def down(self) -> RowSpec:
        """The projection back to the residual stream."""
        sizes, init = (self.ffn_hidden_size, self.hidden_size), Init(scale=self.output_std)
        return RowSpec(*sizes, self.has_mlp_bias, init=init, role="linear_fc2")

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of both projections."""
        return {
            **prefixed("up", parameters_of(self.up, sequence_parallel)),
            **prefixed("down", parameters_of(self.down, sequence_parallel)),
        }

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns what the activation saves, and its result, which the next projection saves."""
        if layer_pass.recompute.selects("mlp"):
            return {}
        width = layer_pass.tokens // layer_pass.tp * self.ffn_hidden_size
        saved_bytes = layer_pass.saved_bytes
        return {
            "": width * saved_bytes.activation * self.activation_saves,
            "down": saved_bytes.of_linear(width),
        }

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the first projection."""
        return "up"

    def converts_input(self, layer_pass: LayerPass) -> bool:
        """Returns whether the layer itself is not recomputed."""
        return not layer_pass.recompute.selects("mlp")

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses tensor-parallel sizes that do not divide the width."""
        check_divisible(self, "ffn_hidden_size", "tp", layout.tp)
