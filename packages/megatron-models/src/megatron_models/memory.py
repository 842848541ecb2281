"""Memory of a training step on one rank, from the configuration alone.

Counts what stays: parameters, gradients, optimizer state, and the activations kept from the forward
for the backward pass (`megatron_models.activations` has their formula, term by term). What an
operation needs while it runs, and what an allocator leaves unused, comes on top.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from megatron_parallel import Recompute

from megatron_models.activations import Keeping, stack_activations
from megatron_models.config import GPTConfig
from megatron_models.parameters import parameter_shapes

Precision = Literal["float32", "bfloat16"]

_FP32 = 4
_MOMENTS = 2  # of AdamW, in float32
_WHOLE: Final = ("norm.weight", "norm.bias", "out.bias", "down.bias", "position.weight")
"""Ends of the names of parameters that tensor parallelism does not cut."""


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
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    layers: int | None = None,
    in_flight: int = 1,
    recompute: Recompute | None = None,
) -> TrainingMemory:
    """Return the bytes that training with AdamW holds on one rank, with fused kernels.

    Args:
        config: the model.
        sequence_length: tokens in a sequence.
        micro_batch_size: sequences in a forward pass.
        precision: of parameters and activations; with bfloat16 the optimizer keeps float32 main
            parameters too.
        tp: tensor-parallel ranks.
        sequence_parallel: whether activations between the cut layers are cut too.
        layers: those of the first pipeline stage; by default the whole model is one stage.
        in_flight: micro-batches whose activations are kept at once: `pp` on the first stage of
            1F1B with enough of them.
        recompute: what is computed again; by default nothing.
    """
    config.check_sequence_length(sequence_length)
    size = _FP32 if precision == "float32" else 2
    count = _parameters(config, tp, layers)
    main = 0 if precision == "float32" else 1
    keeping = Keeping(element=size)
    stack = stack_activations(
        config,
        sequence_length,
        micro_batch_size,
        keeping,
        layers=None if layers is None else range(layers),
        tp=tp,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    tokens = sequence_length * micro_batch_size
    ends = 8 * tokens  # the tokens of the embedding
    if layers is None:
        outside = tokens // tp if sequence_parallel else tokens
        norm = 2 * config.hidden_size * size
        norm += keeping.statistic * (2 if config.normalization == "LayerNorm" else 1)
        # The label, two flags of it, and probabilities over the vocabulary.
        ends += outside * norm + tokens * (8 + 2 + config.padded_vocab_size // tp * _FP32)
    return TrainingMemory(
        parameters=count * size,
        gradients=count * size,
        optimizer=count * _FP32 * (_MOMENTS + main),
        activations=in_flight * (stack + ends),
    )


def _parameters(config: GPTConfig, tp: int, layers: int | None) -> int:
    """Elements of one rank's parameters, padding included: of the first stage, or of all."""
    total = 0
    for name, shape in parameter_shapes(config).items():
        kind, _, rest = name.partition(".")
        if layers is not None and (
            kind in ("final_norm", "output")
            or (kind == "layers" and int(rest.partition(".")[0]) >= layers)
        ):
            continue
        numel = math.prod(shape)
        if name.endswith("word.weight") or kind == "output":
            numel = config.padded_vocab_size * config.hidden_size
        total += numel if name.endswith(_WHOLE) else numel // tp
    return total
