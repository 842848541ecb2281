"""Memory of a training step on one rank, from the configuration alone.

Counts what stays: parameters, gradients, optimizer state, and the activations kept from the forward
for the backward pass (`megatron_models.activations` has their formula, term by term). What an
operation needs while it runs, and what an allocator leaves unused, comes on top.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, Literal

from megatron_parallel import DataParallelConfig, ParallelLayout, Recompute

from megatron_models.activations import Keeping, stack_activations
from megatron_models.config import GPTConfig
from megatron_models.errors import ConfigError
from megatron_models.expert_activations import ExpertRanks
from megatron_models.parameters import parameter_shapes

Precision = Literal["float32", "bfloat16"]

_FP32 = 4
_MOMENTS = 2  # of AdamW, in float32
_WHOLE: Final = (
    "norm.weight",
    "norm.bias",
    "out.bias",
    "down.bias",
    "position.weight",
    "router.weight",
)
"""Ends of the names of parameters outside of experts that tensor parallelism does not cut."""


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
    layout: ParallelLayout | None = None,
    data_parallel: DataParallelConfig | None = None,
    sequence_parallel: bool = False,
    layers: int | None = None,
    in_flight: int = 1,
    recompute: Recompute | None = None,
    dispatcher: str = "allgather",
) -> TrainingMemory:
    """Return the bytes that training with AdamW holds on one rank, with fused kernels.

    Parameters, gradients and optimizer state are those of the tensors themselves: the buckets they
    lie in are padded by less than 64 elements a parameter and 64 for each rank a bucket is cut
    over. What is cut over data-parallel ranks is the mean of them. Fully sharded training holds the
    gathered parameters of a layer beside this, and whole gradients between micro-batches.

    Args:
        config: the model.
        sequence_length: tokens in a sequence.
        micro_batch_size: sequences in a forward pass.
        precision: of parameters and activations; with bfloat16 the optimizer keeps float32 main
            parameters too.
        layout: ranks of each kind, the data-parallel ones given; by default one rank.
        data_parallel: what of parameters, gradients and optimizer state is cut over data-parallel
            ranks, and in which precision gradients are added up; by default nothing is cut.
        sequence_parallel: whether activations between the cut layers are cut too.
        layers: those of the first pipeline stage; by default the whole model is one stage.
        in_flight: micro-batches whose activations are kept at once: `pp` on the first stage of
            1F1B with enough of them.
        recompute: what is computed again; by default nothing.
        dispatcher: how tokens get to their experts, ``allgather`` or ``alltoall``.

    Raises:
        ConfigError: the sequence is longer than the model's positions, or ``layout`` does not say
            how many data-parallel ranks there are.
    """
    config.check_sequence_length(sequence_length)
    layout = layout or ParallelLayout(dp=1)
    if layout.dp is None:
        raise ConfigError(f"{layout} has no data-parallel size: call its resolve(world size)")
    size = _FP32 if precision == "float32" else 2
    held = _model_states(config, layout, data_parallel or DataParallelConfig(), size, layers)
    tp = layout.tp
    sequence_length = -(-sequence_length // layout.cp)
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
        experts=ExpertRanks(layout.ep, layout.expert_tp, dispatcher),
    )
    tokens = sequence_length * micro_batch_size
    ends = 8 * tokens  # the tokens of the embedding
    if layers is None:
        outside = tokens // tp if sequence_parallel else tokens
        norm = 2 * config.hidden_size * size
        norm += keeping.statistic * (2 if config.normalization == "LayerNorm" else 1)
        # The label, two flags of it, and probabilities over the vocabulary.
        ends += outside * norm + tokens * (8 + 2 + config.padded_vocab_size // tp * _FP32)
    return dataclasses.replace(held, activations=in_flight * (stack + ends))


def _model_states(
    config: GPTConfig,
    layout: ParallelLayout,
    data_parallel: DataParallelConfig,
    size: int,
    layers: int | None,
) -> TrainingMemory:
    """Bytes of parameters of ``size`` bytes each, of their gradients and of AdamW's state."""
    dense, experts = _elements(config, layout, layers)
    whole = dense + experts
    data_ranks = (layout.dp or 1) * layout.cp // layout.dp_outer
    part = -(-dense // data_ranks) + -(-experts // layout.expert_dp)
    state = _FP32 * (_MOMENTS if size == _FP32 else _MOMENTS + 1)
    if data_parallel.use_torch_fsdp2:  # experts are copied like the rest
        part = -(-whole // data_ranks)
        return TrainingMemory(part * size, part * size, part * state, 0)
    main = 2 if size == 2 and data_parallel.low_precision else _FP32
    updated = part if data_parallel.use_distributed_optimizer else whole
    return TrainingMemory(whole * size, whole * main, updated * state, 0)


def _elements(config: GPTConfig, layout: ParallelLayout, layers: int | None) -> tuple[int, int]:
    """Elements of one rank's parameters, of the first stage or of all: dense ones, and experts'.

    Padding of the vocabulary is included.
    """
    dense = experts = 0
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
        if ".experts." in name:
            experts += numel // (layout.ep * layout.expert_tp)
        elif name.endswith(_WHOLE):
            dense += numel
        else:
            dense += numel // layout.tp
    return dense, experts
