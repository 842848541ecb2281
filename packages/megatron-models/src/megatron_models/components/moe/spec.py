"""Router, experts and shared expert of a mixture of experts as plain data.

Importing this module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from megatron_parallel import ParallelLayout, Sharding
from megatron_parallel.sharding import ZEROS, Init

from megatron_models.components.fields import check_divisible
from megatron_models.components.measure import Measure
from megatron_models.components.mixer import (
    BytesByPart,
    Feature,
    LayerPass,
    Mixer,
    Parameters,
    ParameterSpec,
    UnsupportedFeature,
    parameters_of,
    prefixed,
    routed_parameters,
)
from megatron_models.components.mlp.spec import MLPSpec
from megatron_models.components.moe.activations import expert_activations
from megatron_models.components.moe.config import MoEConfig
from megatron_models.components.moe.measures import routing_measures

LOAD_BALANCING: Final[Mapping[str, str]] = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names of load-balancing losses by type, as in Megatron-LM."""
Z_LOSS: Final = "z_loss"
EXPERT_BIAS: Final = "expert_bias"

Cut = Literal["outputs", "inputs"]


_TURN_ON_RANK = "gives experts the tokens of each rank in turn; leave it out"
_COUNTS_RANKS = (
    "counts tokens of micro-batches that other ranks compute at the same time; use another loss"
)
_WHOLE_SAMPLES: Final = "routers balance experts over micro-batches of whole samples"
_COUNTS_IN_PLACE: Final = (
    "routers count tokens in place, which a compiled layer with two halves of a backward pass "
    "cannot; leave one of them out"
)
_CHOOSES_LATER_TOKENS: Final = "lets experts select among later tokens too; use another router"
_NO_ROUTER_GRADIENT: Final = (
    "gives the router no gradient of the loss, since the weight of the only expert is always 1; "
    "add {moe_router_pre_softmax:name}"
)


@dataclass(frozen=True)
class ExpertLinearSpec:
    """A linear layer for each expert, weight ``(experts, *outputs, inputs)``.

    Attributes:
        experts: Number of experts of the whole layer, divided by the axis ``ep``.
        inputs: Size of an input row.
        outputs: Shape of an output row; with two dims, the first enumerates fused weights.
        cut: What ``expert_tp`` cuts: the last dim of ``outputs``, or the inputs.
        bias: Whether there is a bias.
        init: Initialization of the weight; the bias starts at zero.
        role: Megatron-Core's name of the layer, which selects its product.
    """

    experts: int
    inputs: int
    outputs: tuple[int, ...]
    cut: Cut
    bias: bool
    init: Init
    role: str

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the shardings of weight and bias; sequence parallelism has no effect."""
        del sequence_parallel
        fused, last = 1 if len(self.outputs) > 1 else None, len(self.outputs)
        dim = last if self.cut == "outputs" else last + 1
        shape = (self.experts, *self.outputs)
        found = {
            "weight": Sharding(
                (*shape, self.inputs),
                "expert_tp",
                dim,
                fused_dim=fused,
                experts=True,
                init=self.init,
            )
        }
        if self.bias:
            found["bias"] = Sharding(
                shape, "expert_tp", last, fused_dim=fused, experts=True, init=ZEROS
            )
        return found


@dataclass(frozen=True, kw_only=True)
class MoESpec(MoEConfig, Mixer):
    """Feed-forward layers of which each token uses a few, and an optional shared one.

    Attributes:
        layers_with_experts: Number of layers over which reported losses are means, with those of
            multi-token prediction. 0: those of ``moe_layer_freq``.
    """

    layers_with_experts: int = 0

    module: ClassVar[str] = "megatron_models.components.moe.module:MoE"
    recompute_name: ClassVar[str | None] = "moe"
    reads_padding: ClassVar[bool] = True
    expert_parallel: ClassVar[bool] = True

    def router(self) -> dict[str, Sharding]:
        """Returns the shardings of weight ``[e, h]`` and bias ``[e]``, which every rank holds.

        The tokens of a micro-batch are divided over tensor-parallel ranks, with or without sequence
        parallelism, so its gradient is always a partial sum over them.
        """
        shape = (self.num_experts, self.hidden_size)
        init = Init(scale=self.init_method_std)
        found = {"weight": Sharding(shape, init=init, partial="tp")}
        if self.moe_router_add_bias:
            found["bias"] = Sharding(shape[:1], init=ZEROS, partial="tp")
        return found

    @property
    def uses_noise(self) -> bool:
        """Whether the inputs of the router have noise in training."""
        return self.moe_input_jitter_eps > 0

    def state(self) -> dict[str, Sharding]:
        """Returns the sharding of the biases of experts ``[e]``, which every rank holds; or none.

        The observations are the tokens of each expert, which differ between tensor-parallel ranks.
        """
        if not self.moe_router_enable_expert_bias:
            return {}
        cut = Sharding((self.num_experts,), init=ZEROS, partial="tp", reduce="sum")
        return {f"router.{EXPERT_BIAS}": cut}

    @property
    def experts_up(self) -> ExpertLinearSpec:
        """The projections to the experts' width."""
        width = self.moe_ffn_hidden_size
        rows, init = (2, width) if self.gated else (width,), Init(scale=self.init_method_std)
        return ExpertLinearSpec(
            self.num_experts,
            self.hidden_size,
            rows,
            "outputs",
            self.has_mlp_bias,
            init,
            "linear_fc1",
        )

    @property
    def experts_down(self) -> ExpertLinearSpec:
        """The projections back to the residual stream."""
        rows, init = (self.hidden_size,), Init(scale=self.output_std)
        return ExpertLinearSpec(
            self.num_experts,
            self.moe_ffn_hidden_size,
            rows,
            "inputs",
            self.has_mlp_bias,
            init,
            "linear_fc2",
        )

    @property
    def shared(self) -> MLPSpec | None:
        """The shared expert, which every token uses, or None."""
        width = self.moe_shared_expert_intermediate_size
        return self.component(MLPSpec, ffn_hidden_size=width) if width else None

    def shared_gate(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the sharding of the shared expert's gate ``[1, h]``, or none.

        Under sequence parallelism a rank gates its part of the sequence, so the gradient is a
        partial sum.
        """
        if not self.moe_shared_expert_gate:
            return {}
        partial, init = "tp" if sequence_parallel else None, Init(scale=self.init_method_std)
        return {"weight": Sharding((1, self.hidden_size), init=init, partial=partial)}

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of router, experts and shared expert."""
        # Megatron-LM's count of operations leaves out the products of router and gate.
        router = {name: ParameterSpec(sharding) for name, sharding in self.router().items()}
        experts = {
            **prefixed("up", parameters_of(self.experts_up, sequence_parallel)),
            **prefixed("down", parameters_of(self.experts_down, sequence_parallel)),
        }
        experts = routed_parameters(experts, self.num_experts, self.moe_router_topk)
        found = {**prefixed("router", router), **prefixed("experts", experts)}
        if self.shared is not None:
            found |= prefixed("shared", self.shared.parameters(sequence_parallel))
        for name, sharding in self.shared_gate(sequence_parallel).items():
            found[f"shared_gate.{name}"] = ParameterSpec(sharding)
        return found

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the bytes that routing, dispatch and experts save."""
        return {} if layer_pass.recompute.selects("moe") else expert_activations(self, layer_pass)

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the part that saves the input itself and not a copy in higher precision."""
        wide = layer_pass.saved_bytes.activation >= 4
        if layer_pass.recompute.selects("moe") or wide or self.moe_shared_expert_intermediate_size:
            return "up"
        return None

    def converts_input(self, layer_pass: LayerPass) -> bool:
        """Returns whether the shared experts alone save the input."""
        return layer_pass.saved_bytes.activation < 4 and not layer_pass.recompute.selects("moe")

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses sizes that do not divide the experts, or the channels of each."""
        check_divisible(self, "num_experts", "ep", layout.ep)
        axis = "tp" if layout.etp is None else "etp"
        check_divisible(self, "moe_ffn_hidden_size", axis, layout.expert_tp, "the experts' ")
        if self.has_mlp_bias:  # the bias of the second matrix is cut too
            check_divisible(self, "hidden_size", axis, layout.expert_tp, "the experts' ")
        check_divisible(self, "moe_shared_expert_intermediate_size", "tp", layout.tp)

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns the features that are unproven for experts, and a router without a gradient."""
        if feature == "from_scratch":
            one = self.moe_router_topk == 1 and not self.moe_router_expert_choice
            if not one or not (self.softmax_of_selected or self.normalizes_weights):
                return None
            return UnsupportedFeature("{moe_router_topk}", _NO_ROUTER_GRADIENT)
        if feature == "decode":
            if not self.moe_router_expert_choice:
                return None
            return UnsupportedFeature("{moe_router_expert_choice:name}", _CHOOSES_LATER_TOKENS)
        if feature == "equal_layouts":
            return self._differs_between_layouts()
        why = {"document_pool": _WHOLE_SAMPLES, "compiled_split": _COUNTS_IN_PLACE}.get(feature)
        return None if why is None else UnsupportedFeature("{num_experts:name}", why)

    def _differs_between_layouts(self) -> UnsupportedFeature | None:
        if self.moe_router_force_load_balancing:
            return UnsupportedFeature("{moe_router_force_load_balancing:name}", _TURN_ON_RANK)
        if "global_aux_loss" not in self.balancing_losses:
            return None
        own = self.moe_router_load_balancing_type == "global_aux_loss"
        field = "moe_router_load_balancing_type" if own else "moe_global_aux_loss_coeff"
        return UnsupportedFeature(f"{{{field}}}", _COUNTS_RANKS)

    def counters(self) -> int:
        """Returns the number of values of `routing_counts`."""
        return 2 * self.num_experts + 2

    def always_counts(self) -> bool:
        """Returns whether rows of experts have a bound, which more rows may exceed."""
        return self.moe_expert_rank_capacity_factor > 0

    def measures(self, counts: Sequence[float]) -> tuple[Measure, ...]:
        """Returns load of the experts, entropy of the router, and share of dropped selections."""
        return routing_measures(counts, self.num_experts)

    def auxiliary_losses(self) -> tuple[str, ...]:
        """Returns the names of the router's losses."""
        names = [LOAD_BALANCING[kind] for kind in self.balancing_losses]
        return (*names, Z_LOSS) if self.moe_z_loss_coeff else tuple(names)
