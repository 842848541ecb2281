"""Memory of a training step on one rank, from the configuration alone.

Counts what stays: parameters, gradients, optimizer state, and the activations kept from the forward
for the backward pass (`megatron_models.activations` has their formula, term by term). What an
operation needs while it runs, and what an allocator leaves unused, comes on top.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from megatron_parallel import AbstractMesh, DataParallelConfig, ParallelLayout, RecomputeConfig

from megatron_models.activations import stack_activations
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.mixer import ExpertParallelism, LayerPass
from megatron_models.components.saved_bytes import SavedBytes
from megatron_models.errors import ConfigError
from megatron_models.models.model_config import ModelConfig

if TYPE_CHECKING:
    from megatron_parallel.tensor_parallel import Product

Precision = Literal["float32", "bfloat16"]

_FP32 = 4
_ADAM_MOMENTS = 2


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
    config: ModelConfig,
    sequence_length: int,
    micro_batch_size: int,
    precision: Precision = "float32",
    *,
    layout: ParallelLayout | None = None,
    data_parallel: DataParallelConfig | None = None,
    sequence_parallel: bool = False,
    layers: int | None = None,
    in_flight: int = 1,
    recompute: RecomputeConfig | None = None,
    dispatcher: str = "allgather",
    moments: int = _ADAM_MOMENTS,
    products: "Mapping[str, Product] | None" = None,
    saves_logits: bool = True,
) -> TrainingMemory:
    """Returns the bytes that training holds on one rank, with fused kernels.

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
        moments: float32 tensors that the optimizer's update rule keeps for each parameter. Defaults
            to the two of AdamW.
        products: what linear layers multiply by, by role (`Placement.products`). Where one adapts,
            only what it adds has gradients and optimizer state. Defaults to plain products.
        saves_logits: Whether the loss saves a number for each token and vocabulary entry, as all
            but `LinearCrossEntropy` do (`Placement.vocabulary_loss`).

    Raises:
        ConfigError: the sequence is longer than the model's positions, or ``layout`` does not say
            how many data-parallel ranks there are.
    """
    trunk, layout = config.trunk(), layout or ParallelLayout(dp=1)
    if trunk.embedding is not None:
        trunk.embedding.check_sequence_length(sequence_length)
    if layout.dp is None:
        raise ConfigError(f"{layout} has no data-parallel size: call its resolve(world size)")
    size = _FP32 if precision == "float32" else 2
    sharing = data_parallel or DataParallelConfig()
    held = _model_states(config, layout, sharing, size, layers, moments, products or {})
    layer_pass = LayerPass(
        -(-sequence_length // layout.cp),
        micro_batch_size,
        SavedBytes(activation=size),
        layout.tp,
        sequence_parallel,
        recompute or RecomputeConfig(),
        ExpertParallelism(layout.ep, layout.expert_tp, dispatcher),
    )
    stack = stack_activations(config, layer_pass, layers=None if layers is None else range(layers))
    ends = 8 * layer_pass.tokens  # the tokens of the embedding
    if layers is None:
        ends += _end(trunk, layer_pass, saves_logits)
    return dataclasses.replace(held, activations=in_flight * (stack + ends))


def _end(trunk: TrunkSpec, layer_pass: LayerPass, saves_logits: bool) -> int:
    """Bytes that the final norm, the output layer and the loss keep."""
    # The input of the output layer.
    kept = layer_pass.stream_tokens * trunk.width * layer_pass.saved_bytes.activation
    if trunk.final_norm is not None:
        kept += trunk.final_norm.activation_bytes(layer_pass)
    if trunk.embedding is not None:
        # The label, two flags of it, and probabilities over the vocabulary; or the label.
        part = trunk.embedding.padded_vocab_size // layer_pass.tp
        kept += layer_pass.tokens * (8 + 2 + part * _FP32 if saves_logits else 8)
    return kept


def _model_states(
    config: ModelConfig,
    layout: ParallelLayout,
    data_parallel: DataParallelConfig,
    size: int,
    layers: int | None,
    moments: int,
    products: "Mapping[str, Product]",
) -> TrainingMemory:
    """Bytes of parameters of ``size`` bytes each, their gradients and the optimizer's state."""
    base = _elements(config, layout, layers)
    further = _elements(config, layout, layers, products)
    held = size * (sum(base) + sum(further))
    dense, experts = further
    if not any(product.is_adapter for product in products.values()):
        dense, experts = dense + base[0], experts + base[1]
    whole = dense + experts
    data_ranks = (layout.dp or 1) * layout.cp // layout.dp_outer
    part = -(-dense // data_ranks) + -(-experts // layout.expert_dp)
    state = _FP32 * (moments if size == _FP32 else moments + 1)
    if data_parallel.use_torch_fsdp2:  # experts are copied like the rest
        part = -(-whole // data_ranks)
        cut = -(-held // (size * data_ranks))
        return TrainingMemory(cut * size, part * size, part * state, 0)
    main = 2 if size == 2 and data_parallel.low_precision else _FP32
    updated = part if data_parallel.use_distributed_optimizer else whole
    return TrainingMemory(held, whole * main, updated * state, 0)


def _elements(
    config: ModelConfig,
    layout: ParallelLayout,
    layers: int | None,
    products: "Mapping[str, Product] | None" = None,
) -> tuple[int, int]:
    """Elements of one rank's parameters, of the first stage or of all: dense ones, and experts'.

    With ``products``, of what these add. Padding of the vocabulary is included.
    """
    dense = experts = 0
    parameters = config.parameters()
    if layers is not None:
        parameters = config.trunk().stage(range(layers), first=True, last=False).parameters()
    mesh = AbstractMesh(layout)
    for spec in parameters.values():
        shardings = [spec.sharding]
        if products is not None:
            product = products.get(spec.role)
            shardings = [] if product is None else [*product.shardings(spec.sharding).values()]
        numel = sum(prod(sharding.local_shape(mesh)) for sharding in shardings)
        if spec.sharding.experts:
            experts += numel
        else:
            dense += numel
    return dense, experts
