"""Memory of a training step on one rank, from the configuration alone.

Counts what stays: parameters, gradients, optimizer state, and the activations kept from the forward
for the backward pass when nothing is recomputed. What an operation needs while it runs, and what an
allocator leaves unused, comes on top.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_models.config import GPTConfig
from megatron_models.parameters import parameter_count

Precision = Literal["float32", "bfloat16"]

_FP32 = 4
_INDEX = 8
_MOMENTS = 2  # of AdamW, in float32


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes by what they hold."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def training_memory(
    config: GPTConfig,
    sequence_length: int,
    micro_batch_size: int,
    precision: Precision = "float32",
) -> TrainingMemory:
    """Return the bytes that training with AdamW holds on one rank.

    Args:
        config: the model.
        sequence_length: tokens in a sequence.
        micro_batch_size: sequences in a forward pass.
        precision: of parameters and activations; with bfloat16 the optimizer keeps float32 main
            parameters too.
    """
    config.check_sequence_length(sequence_length)
    size = _FP32 if precision == "float32" else 2
    count = parameter_count(config, padded=True)
    main = 0 if precision == "float32" else 1
    tokens = sequence_length * micro_batch_size
    return TrainingMemory(
        parameters=count * size,
        gradients=count * size,
        optimizer=count * _FP32 * (_MOMENTS + main),
        activations=tokens * _bytes_per_token(config, size),
    )


def _bytes_per_token(config: GPTConfig, size: int) -> int:
    routed = sum(config.moe_layers)
    layers = config.num_layers * (_attention(config, size) + _norm(config, size))
    layers += (config.num_layers - routed) * _feed_forward(config, config.ffn_hidden_size, size)
    layers += routed * _experts(config, size)
    numbers = 16 + 2  # the token and its label, and two flags of the label
    probabilities = config.padded_vocab_size * _FP32
    return layers + _norm(config, size) + probabilities + numbers


def _norm(config: GPTConfig, size: int) -> int:
    """Input, output (for the layer after it), and the statistics in float32.

    This is what fused kernels keep; on CPUs torch's RMSNorm keeps up to 8 bytes a channel more.
    """
    statistics = 2 if config.normalization == "LayerNorm" else 1
    return 2 * config.hidden_size * size + statistics * _FP32


def _attention(config: GPTConfig, size: int) -> int:
    """Norm, fused projection, output, and each head's logarithm of the sum of exponentials."""
    key = config.num_query_groups * config.kv_channels
    fused = config.query_size + 2 * key
    copies = 0  # of queries and keys, beside the fused tensor that also holds the values
    if config.rotary_dim:
        copies = config.query_size + key
    elif config.heads_per_group > 1 and config.num_query_groups > 1:
        copies = config.query_size
    elements = fused + copies + config.query_size
    return _norm(config, size) + elements * size + config.num_attention_heads * _FP32


def _feed_forward(config: GPTConfig, width: int, size: int) -> int:
    """Input and output of the activation; SwiGLU also keeps the activated gate."""
    return width * (4 if config.gated else 2) * size


def _experts(config: GPTConfig, size: int) -> int:
    """A token of a layer with experts, routed without losses: a row for each of its choices.

    The router works on a float32 copy where the input is none. Answers are kept in float32 to
    weight them. Of each choice its expert, weight, place, and way back.
    """
    hidden, choices = config.hidden_size, config.moe_router_topk
    row = hidden * (size + _FP32) + _feed_forward(config, config.moe_ffn_hidden_size, size)
    biases = 2 * _INDEX if config.add_bias_linear else 0
    exact = hidden * _FP32 if size != _FP32 else 0
    shared = _feed_forward(config, config.moe_shared_expert_intermediate_size, size)
    return choices * (row + 3 * _INDEX + _FP32 + biases) + exact + shared
