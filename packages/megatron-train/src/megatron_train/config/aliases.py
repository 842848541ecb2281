"""Flags and values of Megatron-LM that set other options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_train.errors import TrainError

FLAG_VALUE = object()
"""Stands in an alias for the value given with the flag."""


@dataclass(frozen=True)
class Alias:
    """A flag that sets other options.

    Attributes:
        sets: Pairs of an option's key and its value; `FLAG_VALUE` stands for the flag's value.
        help: One line of help.
        weak: Whether a value given for the option itself overrides the alias.
        convert: Converts the flag's value to that of the option. It raises `TrainError`.
    """

    sets: tuple[tuple[str, Any], ...]
    help: str
    weak: bool = False
    convert: Callable[[str], str | bool] = str

    @property
    def takes_value(self) -> bool:
        """Whether the flag takes a value."""
        return any(value is FLAG_VALUE for _, value in self.sets)


def _window_tokens(text: str) -> str:
    """Returns the tokens of a window, from Megatron-LM's numbers of tokens on both sides."""
    before, comma, after = text.strip().removeprefix("(").removesuffix(")").partition(",")
    try:
        left, right = int(before), int(after)
    except ValueError:
        left, right = -2, 0
    if not comma or left < -1:
        raise TrainError(f"{text!r} is not two numbers of tokens L,R; use for example 127,0")
    if right not in (0, -1) or (right == -1 and left != -1):
        raise TrainError(f"{text!r}: causal attention has no tokens after its own; use {left},0")
    return str(left + 1)


def _inverse(text: str) -> str:
    """Returns 1 / X, the divisor that stands for a factor."""
    try:
        return repr(1 / float(text))
    except (ValueError, ZeroDivisionError):
        raise TrainError(f"{text!r} is not a number other than 0; use for example 0.25") from None


def _is_fp32(text: str) -> bool:
    """Returns whether a format of gradients is fp32 and not bf16."""
    if text not in ("fp32", "bf16"):
        raise TrainError(f"{text!r} is not a format of gradients; use fp32 or bf16")
    return text == "fp32"


ALIASES: Mapping[str, Alias] = {
    "--encoder-seq-length": Alias((("data.seq_length", FLAG_VALUE),), "the same as --seq-length"),
    "--decoder-num-layers": Alias((("model.num_layers", FLAG_VALUE),), "the same as --num-layers"),
    "--window-size": Alias(
        (("model.sliding_window", FLAG_VALUE),),
        "the same as --sliding-window L+1, for L,0; -1 for L means no window",
        convert=_window_tokens,
    ),
    "--mup-embedding-mult": Alias(
        (("model.embedding_multiplier", FLAG_VALUE),), "the same as --embedding-multiplier"
    ),
    "--mup-output-mult": Alias(
        (("model.logits_scaling", FLAG_VALUE),),
        "the same as --logits-scaling 1/X",
        convert=_inverse,
    ),
    "--grad-reduce-in-bf16": Alias(
        (("data_parallel.accumulate_allreduce_grads_in_fp32", False),),
        "the same as --no-accumulate-allreduce-grads-in-fp32",
    ),
    "--main-grads-dtype": Alias(
        (("data_parallel.accumulate_allreduce_grads_in_fp32", FLAG_VALUE),),
        "fp32 is the same as --accumulate-allreduce-grads-in-fp32, and bf16 the opposite",
        convert=_is_fp32,
    ),
    "--grad-reduce-in-fp32": Alias(
        (("data_parallel.accumulate_allreduce_grads_in_fp32", True),),
        "the same as --accumulate-allreduce-grads-in-fp32",
    ),
    "--swiglu": Alias((("model.activation", "swiglu"),), "the same as --activation swiglu"),
    "--squared-relu": Alias(
        (("model.activation", "squared_relu"),), "the same as --activation squared_relu"
    ),
    "--quick-geglu": Alias(
        (("model.activation", "quick_geglu"),), "the same as --activation quick_geglu"
    ),
    "--openai-gelu": Alias(
        (("model.activation", "gelu_tanh"),), "the same as --activation gelu_tanh"
    ),
    "--group-query-attention": Alias(
        (("model.num_query_groups", 1),),
        "the same as --num-query-groups 1, unless --num-query-groups is given",
        weak=True,
    ),
    "--use-rotary-position-embeddings": Alias(
        (("model.position_embedding_type", "rope"),), "the same as --position-embedding-type rope"
    ),
    "--use-rope-scaling": Alias(
        (("model.rope_scaling_type", "llama3"),), "the same as --rope-scaling-type llama3"
    ),
    "--rotary-scaling-factor": Alias(
        (("model.rope_scaling_factor", FLAG_VALUE),), "the same as --rope-scaling-factor"
    ),
    "--yarn-original-max-position-embeddings": Alias(
        (("model.rope_scaling_original_length", FLAG_VALUE),),
        "the same as --rope-scaling-original-length",
    ),
    "--rotary-seq-len-interpolation-factor": Alias(
        (("model.rope_scaling_type", "linear"), ("model.rope_scaling_factor", FLAG_VALUE)),
        "the same as --rope-scaling-type linear --rope-scaling-factor X",
    ),
    "--fp8-e4m3": Alias((("low_precision.fp8_format", "e4m3"),), "the same as --fp8-format e4m3"),
    "--fp8-hybrid": Alias(
        (("low_precision.fp8_format", "hybrid"),), "the same as --fp8-format hybrid"
    ),
    "--disable-fp8-wgrad": Alias(
        (("low_precision.fp8_wgrad", False),), "the same as --no-fp8-wgrad"
    ),
    "--layernorm-epsilon": Alias(
        (("model.norm_epsilon", FLAG_VALUE),), "the same as --norm-epsilon"
    ),
    "--hybrid-override-pattern": Alias(
        (("model.hybrid_layer_pattern", FLAG_VALUE),), "the same as --hybrid-layer-pattern"
    ),
    "--recompute-activations": Alias(
        (("recompute.granularity", "selective"),), "the same as --recompute-granularity selective"
    ),
    "--moe-layer-recompute": Alias(
        (("recompute.granularity", "selective"), ("recompute.modules", ("moe",))),
        "the same as --recompute-granularity selective --recompute-modules moe",
    ),
    "--use-flash-attn": Alias(
        (("placement.attention_backend", "flash"),), "the same as --attention-backend flash"
    ),
    "--persistent-save-interval": Alias(
        (("checkpoint.save_interval", FLAG_VALUE),), "the same as --save-interval"
    ),
    "--use-checkpoint-opt_param-scheduler": Alias(
        (("checkpoint.use_checkpoint_opt_param_scheduler", True),),
        "the same as --use-checkpoint-opt-param-scheduler",
    ),
    "--override-opt_param-scheduler": Alias(
        (("checkpoint.override_opt_param_scheduler", True),),
        "the same as --override-opt-param-scheduler",
    ),
    "--virtual-pipeline-model-parallel-size": Alias(
        (("layout.vpp", FLAG_VALUE),), "the same as --num-virtual-stages-per-pipeline-rank"
    ),
}
"""Flags that set other options."""

ONE_VALUE: Mapping[str, str] = {
    "--moe-router-load-balancing-type": "give one of them, and the weights of the other losses "
    "with --moe-seq-aux-loss-coeff and --moe-global-aux-loss-coeff",
    "--moe-aux-loss-coeff": "give the weight of the loss that --moe-router-load-balancing-type "
    "names, and those of other losses with --moe-seq-aux-loss-coeff and "
    "--moe-global-aux-loss-coeff",
}
"""Flags that take a list in Megatron-LM and one value here, and what to give instead."""

VALUE_ALIASES: Mapping[tuple[str, str], tuple[tuple[str, Any], ...]] = {
    ("optimizer.optimizer", "dist_muon"): (
        ("optimizer.optimizer", "muon"),
        ("data_parallel.use_distributed_optimizer", True),
    ),
}
"""Values of flags that stand for several options: pairs of keys and values, by key and value."""
