"""Memory of a training step on one rank, computed from the configuration alone.

Counts the persistent tensors: parameters, gradients, optimizer state, and the activations saved for
the backward pass (`megatron_models.activations` has their formula). Temporary buffers of operations
and unused memory of an allocator come on top.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from megatron_parallel import (
    AbstractMesh,
    DataParallelConfig,
    ParallelLayout,
    RecomputeConfig,
    Sharding,
)

from megatron_models.activations import stack_activations
from megatron_models.components.embedding.spec import OutputConfig
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.mixer import ExpertParallelism, LayerPass, prefixed
from megatron_models.components.saved_bytes import SavedBytes
from megatron_models.errors import ConfigError
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.low_precision.memory import (
    HeldWeights,
    linear_roles,
    plain_layers,
    saved_inputs,
)
from megatron_models.models.model_config import ModelConfig

if TYPE_CHECKING:
    from megatron_parallel.tensor_parallel import Product

Precision = Literal["float32", "bfloat16", "float16"]
LossSaves = Literal["logits", "input", "gradients"]

_FP32 = 4
_ADAM_STATE = 8


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step on one rank.

    Attributes:
        parameters: Bytes of the parameters.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer state.
        activations: Bytes of the saved activations.
        converted_weights: Bytes of weights in few bits, which exist during the passes of a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    converted_weights: int = 0

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.converted_weights


_TRANSFORMER_ENGINE: Final = "transformer_engine"
"""As `megatron_kernels.transformer_engine.NAME`, without torch."""


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
    state_bytes: float | Callable[[Sharding], float] = _ADAM_STATE,
    main_bytes: float = _FP32,
    products: "Mapping[str, Product] | None" = None,
    loss_saves: LossSaves = "logits",
    activations: bool = True,
    backends: Mapping[str, str] | None = None,
    attention_dropout: bool = False,
    low_precision: LowPrecisionConfig = LowPrecisionConfig(),  # noqa: B008 - it is frozen
) -> TrainingMemory:
    """Returns the bytes that training holds on one rank, on a CUDA device.

    Parameters, gradients and optimizer state are counted without the padding of buckets, which is
    less than 64 elements a parameter plus 64 for each rank that a bucket is cut over. For tensors
    that are cut over data-parallel ranks the result is the mean over these ranks. Fully sharded
    training also holds the gathered parameters of one layer, and whole gradients between
    micro-batches.

    Args:
        config: The model's configuration.
        sequence_length: Tokens in a sequence.
        micro_batch_size: Sequences in a forward pass.
        precision: Precision of parameters and activations. With bfloat16 and float16 the optimizer
            also holds float32 main parameters.
        layout: Parallel sizes, with ``dp`` resolved. Defaults to one rank.
        data_parallel: Which of parameters, gradients and optimizer state are cut over data-parallel
            ranks, and the precision of gradient accumulation. Defaults to cutting nothing.
        sequence_parallel: Whether activations between tensor-parallel layers are cut too.
        layers: Number of layers of the first pipeline stage. Defaults to the whole model as one
            stage.
        in_flight: Number of micro-batches whose activations are saved at once: `pp` on the first
            stage of 1F1B with enough micro-batches.
        recompute: What activation checkpointing recomputes. Defaults to nothing.
        dispatcher: How tokens are sent to experts, ``allgather`` or ``alltoall``.
        state_bytes: Bytes of state that the update rule holds for each element of a parameter, or a
            function of the parameter's sharding. Defaults to those of AdamW in float32.
        main_bytes: Bytes of the main parameter of each parameter in 16 bits. Defaults to those of
            float32.
        products: Products of linear layers by role (`Placement.products`). Under an adapter only
            the adapter's parameters have gradients and optimizer state. Defaults to plain products.
        loss_saves: What output layer and loss save (`Placement.vocabulary_loss`): a number for each
            token and vocabulary entry (``logits``), or as `LinearCrossEntropy` the ``input`` alone,
            or the ``gradients`` of input and weights.
        activations: Whether activations are counted. Models of several trunks have no formula for
            them.
        backends: Chosen backends of operations (`Placement.backends`). Defaults to none.
        attention_dropout: Whether there is dropout on attention probabilities.
        low_precision: How linear layers multiply in few bits. They save most inputs in few bits
            too, and hold converted weights during the passes of a step.

    Raises:
        ConfigError: The sequence is longer than the model's positions, ``layout.dp`` is None, or
            the activations of several trunks are to be counted.
    """
    layout = layout or ParallelLayout(dp=1)
    config.embedding.check_sequence_length(sequence_length)
    if layout.dp is None:
        raise ConfigError(f"{layout} has no data-parallel size; call its resolve(world_size)")
    size = _FP32 if precision == "float32" else 2
    data_parallel = data_parallel or DataParallelConfig()
    main = 0.0 if size == _FP32 else main_bytes

    def state(sharding: Sharding) -> float:
        return main + (state_bytes(sharding) if callable(state_bytes) else state_bytes)

    held = _model_states(config, layout, data_parallel, size, layers, state, products or {})
    if not activations:
        return held
    if (backends or {}).get("linear") == _TRANSFORMER_ENGINE:
        low_precision = LowPrecisionConfig()  # its products save inputs and weights as they are
    converted = _converted_weights(config, layout, data_parallel, layers, low_precision, backends)
    trunk = config.trunk()
    layer_pass = LayerPass(
        -(-sequence_length // layout.cp),
        micro_batch_size,
        dataclasses.replace(
            SavedBytes.of_backends(size, backends or {}, attention_dropout=attention_dropout),
            linear_input=saved_inputs(low_precision),
        ),
        layout.tp,
        sequence_parallel,
        recompute or RecomputeConfig(),
        ExpertParallelism(layout.ep, layout.expert_tp, dispatcher),
    )
    stack = stack_activations(
        config,
        layer_pass,
        layers=None if layers is None else range(layers),
        plain_layers=plain_layers(low_precision, config.depth),
    )
    ends = 0 if trunk.embedding is None else trunk.embedding.activation_bytes(layer_pass)
    if layers is None:
        bounded = isinstance(config, OutputConfig) and config.final_logit_softcapping > 0
        if config.predicts_tokens:
            ends += _end(trunk, layer_pass, loss_saves, bounded)
        elif trunk.final_norm is not None:
            ends += trunk.final_norm.activation_bytes(layer_pass)
        ends += sum(head.activation_bytes(layer_pass) for head in config.heads().values())
        for spec in config.multi_token():
            ends += sum(spec.activations(layer_pass).values())
            # Each depth has its own final norm in `activations`.
            head = dataclasses.replace(trunk, final_norm=None)
            ends += _end(head, layer_pass, loss_saves, bounded)
    return dataclasses.replace(
        held, converted_weights=converted, activations=in_flight * (stack + ends)
    )


def _end(trunk: TrunkSpec, layer_pass: LayerPass, loss_saves: LossSaves, bounded: bool) -> int:
    """Returns the bytes that the final norm, the output layer and the loss save.

    Logits that are ``bounded`` are saved a second time, for the bound.
    """
    # The input of the output layer.
    saved = layer_pass.stream_tokens * trunk.width * layer_pass.saved_bytes.activation
    if trunk.final_norm is not None:
        saved += trunk.final_norm.activation_bytes(layer_pass)
    if trunk.embedding is not None:
        # The label, two flags for it, and probabilities over the vocabulary; or the label alone.
        # A kernel saves the logits instead, and a log-sum-exp for a flag.
        part, logit = trunk.embedding.padded_vocab_size // layer_pass.tp, _FP32
        flags = 2
        if of_logit := layer_pass.saved_bytes.logit:
            logit, flags = (_FP32 if bounded else of_logit), 1 + _FP32
        copies = 2 if bounded else 1
        logits = flags + part * logit * copies if loss_saves == "logits" else 0
        saved += layer_pass.tokens * (8 + logits)
        if loss_saves == "gradients":  # that of the input, instead of the input, is counted above
            saved += part * trunk.width * _FP32
    return saved


def _model_states(
    config: ModelConfig,
    layout: ParallelLayout,
    data_parallel: DataParallelConfig,
    size: int,
    layers: int | None,
    state: Callable[[Sharding], float],
    products: "Mapping[str, Product]",
) -> TrainingMemory:
    """Returns the bytes of parameters of ``size`` bytes, gradients and optimizer state.

    Each element of a parameter has ``state`` bytes of optimizer state.
    """
    base = _elements(config, layout, layers)
    further = _elements(config, layout, layers, products)
    states = _elements(config, layout, layers, products, state)
    held = size * (sum(base) + sum(further))
    dense, experts = further
    if not any(product.is_adapter for product in products.values()):
        dense, experts = dense + base[0], experts + base[1]
        more = _elements(config, layout, layers, None, state)
        states = states[0] + more[0], states[1] + more[1]
    whole = dense + experts
    data_ranks = (layout.dp or 1) * layout.cp // layout.dp_outer
    part = -(-dense // data_ranks) + -(-experts // layout.expert_dp)
    state_part = round(states[0] / data_ranks + states[1] / layout.expert_dp)
    if data_parallel.use_torch_fsdp2:
        dense_held, experts_held = (a + b for a, b in zip(base, further, strict=True))
        cut = -(-dense_held // data_ranks) + -(-experts_held // layout.expert_dp)
        gradients = part * size
        if layout.expert_dp == 1:  # experts that one rank holds whole have main gradients
            gradients += experts * (_FP32 - size)
        return TrainingMemory(cut * size, gradients, state_part, 0)
    main = 2 if size == 2 and data_parallel.low_precision else _FP32
    updated = state_part if data_parallel.use_distributed_optimizer else round(sum(states))
    return TrainingMemory(held, whole * main, updated, 0)


def _converted_weights(
    config: ModelConfig,
    layout: ParallelLayout,
    data_parallel: DataParallelConfig,
    layers: int | None,
    low_precision: LowPrecisionConfig,
    backends: Mapping[str, str] | None,
) -> int:
    """Returns the bytes of weights in few bits of one rank."""
    held = HeldWeights.of(low_precision, backends or {}, data_parallel.use_torch_fsdp2)
    if not held.each:
        return 0
    roles, mesh = linear_roles(config.parameters()), AbstractMesh(layout)
    plain = plain_layers(low_precision, config.depth)
    trunk = config.trunk()
    numbers = trunk.layers if layers is None else range(layers)
    total = 0.0
    for number in numbers:
        if number in plain:
            continue
        stage = trunk.stage([number], first=False, last=False)
        for spec in stage.parameters().values():
            total += held.bytes_of(spec, prod(spec.sharding.local_shape(mesh)), roles)
    return round(total)


def _elements(
    config: ModelConfig,
    layout: ParallelLayout,
    layers: int | None,
    products: "Mapping[str, Product] | None" = None,
    weight: Callable[[Sharding], float] = lambda _: 1,
) -> tuple[int, int]:
    """Returns the elements of one rank's dense parameters, and of its experts' parameters.

    Counts the first stage or the whole model. With ``products``, counts only the parameters that
    these add. Padding of the vocabulary is included. Each element counts ``weight``.
    """
    dense = experts = 0
    parameters = config.parameters()
    if layers is not None:
        trunk, shared = next(iter(config.trunks().values())), config.shared_embedding()
        parameters = trunk.stage(range(layers), first=True, last=False).parameters()
        if shared is not None:
            parameters |= prefixed("shared", shared.parameters())
    mesh = AbstractMesh(layout)
    for spec in parameters.values():
        shardings = [spec.sharding]
        if products is not None:
            product = products.get(spec.role)
            shardings = [] if product is None else [*product.shardings(spec.sharding).values()]
        numel = round(sum(prod(cut.local_shape(mesh)) * weight(cut) for cut in shardings))
        if spec.sharding.experts:
            experts += numel
        else:
            dense += numel
    return dense, experts
