"""Mixtral: Llama's attention, and a mixture of SwiGLU experts in every layer (Jiang et al., 2024).

Files hold the three matrices of each expert separately: ``w1`` is the gate, ``w3`` up, ``w2`` down.
Softmax over all experts, renormalized over the selected ones, equals softmax over the selected
logits; with one selected expert it is 1.
"""

from megatron_models.families.family import Family, Operation, Row
from megatron_models.families.settings import Constant, Custom, Mapped, Unused, unsupported_field
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import windows

_MOE = "model.layers.{i}.block_sparse_moe"
_EXPERT = f"{_MOE}.experts.{{e}}"
_STACK: Operation = ("stack", {"dim": 0})
_GATE_UP: Operation = (
    "reshape",
    {
        "shape": ["$num_experts", 2, "$moe_ffn_hidden_size", "$hidden_size"],
        "source": [-1, "$moe_ffn_hidden_size", "$hidden_size"],
    },
)

EXPERT_ROWS: tuple[Row, ...] = (
    ("layers.{i}.mlp.router.weight", (f"{_MOE}.gate.weight",), ()),
    (
        "layers.{i}.mlp.experts.up.weight",
        (f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"),
        (_STACK, _GATE_UP),
    ),
    ("layers.{i}.mlp.experts.down.weight", (f"{_EXPERT}.w2.weight",), (_STACK,)),
)


def _every_layer(config: GPTConfig) -> dict[str, object]:
    every = (True,) * config.num_layers
    if config.moe_layers != every:
        raise unsupported_field("moe_layers", repr(every), config.moe_layers)
    return {}


#: Refuses models with dense layers.
EVERY_LAYER = Custom(("moe_layer_freq",), (), read=lambda title, hf_config: {}, write=_every_layer)

FAMILY = Family(
    name="mixtral",
    kind="gpt",
    title="Mixtral",
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    rows=(*llama.START_ROWS, *llama.HEAD_ROWS, *EXPERT_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", null=0),
        "norm_epsilon": Mapped("rms_norm_eps", absent=1e-5),
        "ffn_hidden_size": Unused("intermediate_size"),
        "moe_ffn_hidden_size": Mapped("intermediate_size"),
        "add_bias_linear": Constant(False),
        "num_experts": Mapped("num_local_experts"),
        "moe_router_topk": Mapped("num_experts_per_tok"),
        "moe_router_pre_softmax": Constant(False),
    },
    custom=(
        rope(1e6),
        windows(listed=False),
        EVERY_LAYER,
    ),
    neutral={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_topk_prob": (True,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy",),
        "n_group": (1,),
        "routed_scaling_factor": (1, 1.0),
        "n_shared_experts": (0,),
        "num_shared_experts": (0,),
        "first_k_dense_replace": (0,),
        "moe_layer_freq": (1,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    # Losses and noise of the router belong to training.
    without_effect=frozenset(
        {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
    ),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
