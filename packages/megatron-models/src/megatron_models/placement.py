"""The placement of a model: mesh, dtype, device and options of all its modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, Union

import torch
from megatron_kernels import AUTO, Op, fuses_on, vocab_cross_entropy, vocab_embedding
from megatron_kernels.transformer_engine import NAME as TRANSFORMER_ENGINE
from megatron_parallel import Mesh, RecomputeConfig, Sharding, StepState
from megatron_parallel.sharding.step_state import Update
from megatron_parallel.tensor_parallel import (
    PLAIN,
    UNFUSED_CROSS_ENTROPY,
    ColumnParallelLinear,
    ColumnSpec,
    Product,
    ReplicatedLinear,
    ReplicatedSpec,
    RowParallelLinear,
    RowSpec,
    VocabParallelEmbedding,
    VocabSpec,
    VocabularyLoss,
    with_logits_block,
)
from torch import nn

from megatron_models.fused_operations import SEPARATE
from megatron_models.linear_product import LinearProduct
from megatron_models.transformer_engine.product import TransformerEngineProduct
from megatron_models.vocab_lookup import KernelLookup
from megatron_models.vocab_loss import KernelLogits

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Placement:
    """Settings that all modules of a model share and that are no property of the model.

    Attributes:
        mesh: The mesh over which weights are cut, with this rank's coordinates.
        dtype: Dtype of the parameters. Losses are float32, or float64 for a float64 model.
        device: Device of the parameters. None means the mesh's device. On the meta device a model
            has no values.
        sequence_parallel: Cut activations between the tensor-parallel layers along the sequence,
            ``[s/tp, b, h]``. Gradients of norms, position embeddings and row-parallel biases are
            then partial sums, which `megatron_parallel.GradientBuffers` adds up.
        tp_comm_overlap: With sequence parallelism, communicate in slices while the forward pass
            computes (`megatron_parallel.tensor_parallel.overlap_forward`).
        recompute: What the backward pass recomputes, and where saved activations are stored.
            Defaults to recomputing nothing.
        dispatcher: How tokens are sent to the experts of a mixture of experts: ``allgather`` or
            ``alltoall``, see `megatron_parallel.expert_parallel.dispatch`.
        cp_comm_type: Attention over context-parallel ranks, one value or one for each layer:
            ``p2p`` (ring), ``a2a`` (heads scattered), ``allgather``, or ``a2a+p2p``.
        products: Products of linear layers by role, with Megatron-Core's names: ``linear_qkv``,
            ``linear_proj``, ``linear_q`` and ``linear_kv`` of cross-attention, ``linear_q_proj``,
            ``linear_q_down_proj``, ``linear_q_up_proj``, ``linear_kv_down_proj`` and
            ``linear_kv_up_proj`` of latent attention, ``linear_fc1`` and ``linear_fc2`` of
            feed-forward layers and experts, ``in_proj`` and ``out_proj`` of Mamba layers,
            ``output_layer``. Other layers have the plain product.
            `megatron_parallel.tensor_parallel.freeze_all_but_adapters` then
            freezes the parameters that are not trained.
        plain_layers: Numbers of layers that compute plain products instead.
        vocabulary_loss: Output layer and loss as one operation. By default the logits of all tokens
            are computed.
        backends: Backends of operations of `megatron_kernels` by name. Others use the first backend
            that supports a call. ``linear`` is the product of the linear layers without an entry in
            ``products``. ``separate`` means that layers call the operations that a fused one stands
            for (`megatron_models.fused_operations`). `check_backends` verifies that the model calls
            the operations.
        compiled: Whether torch.compile compiles the layers. It fuses operations itself, so layers
            then call one that stands for several others only if its backend is chosen.
    """

    mesh: Mesh
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    dispatcher: str = "allgather"
    cp_comm_type: str | Sequence[str] = "p2p"
    products: Mapping[str, Product] = field(default_factory=dict)
    plain_layers: frozenset[int] = frozenset()
    vocabulary_loss: VocabularyLoss = UNFUSED_CROSS_ENTROPY
    backends: Mapping[str, str] = field(default_factory=dict)
    compiled: bool = False

    @classmethod
    def resolve(cls, placement: Union["Placement", Mesh]) -> "Placement":
        """Returns ``placement`` itself, or for a mesh a placement with defaults."""
        return cls(placement) if isinstance(placement, Mesh) else placement

    @property
    def resolved_device(self) -> torch.device:
        """Device of the parameters."""
        return self.mesh.device if self.device is None else torch.device(self.device)

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that cut the sequence between tensor-parallel layers."""
        return self.mesh.axis("tp").size if self.sequence_parallel else 1

    def of_layer(self, number: int) -> "Placement":
        """Returns the placement of a layer by its global number."""
        return replace(self, products={}) if number in self.plain_layers else self

    def product(self, role: str) -> Product:
        """Returns the product of the layers with a role."""
        if role in self.products:
            return self.products[role]
        backend = self.backend("linear")
        if backend == TRANSFORMER_ENGINE:
            return TransformerEngineProduct()
        return PLAIN if backend == AUTO else LinearProduct(backend)

    def expert_product(self, role: str) -> Product:
        """Returns the product of the layers of experts with a role, which multiply by groups."""
        return self.products.get(role, PLAIN)

    def backend(self, op: str) -> str:
        """Returns the backend of an operation, ``auto`` if none is chosen."""
        return self.backends.get(op, AUTO)

    def bind(self, op: Op[Any, R]) -> Callable[..., R]:
        """Returns an operation with its backend."""
        return partial(op, backend=self.backend(op.name))

    def fused(self, op: Op[Any, Any]) -> str | None:
        """Returns the backend of an operation that stands for several others, or None for these.

        Without a choice that is ``auto`` if one kernel computes the operation on the device and the
        layers are not compiled.
        """
        backend = self.backend(op.name)
        if backend == SEPARATE:
            return None
        fuses = not self.compiled and fuses_on(op, self.resolved_device, self.dtype)
        return backend if backend != AUTO or fuses else None

    @property
    def bound_vocabulary_loss(self) -> VocabularyLoss:
        """The loss of the output layer, with the backend of `vocab_cross_entropy`."""
        backend = self.fused(vocab_cross_entropy)
        if backend is None:
            return self.vocabulary_loss
        return with_logits_block(self.vocabulary_loss, KernelLogits(backend))

    def column_parallel_linear(self, spec: ColumnSpec) -> ColumnParallelLinear:
        """Builds a column-parallel layer."""
        return ColumnParallelLinear.from_spec(
            spec,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            product=self.product(spec.role),
            dtype=self.dtype,
            device=self.resolved_device,
        )

    def row_parallel_linear(self, spec: RowSpec) -> RowParallelLinear:
        """Builds a row-parallel layer."""
        return RowParallelLinear.from_spec(
            spec,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            product=self.product(spec.role),
            dtype=self.dtype,
            device=self.resolved_device,
        )

    def replicated_linear(self, spec: ReplicatedSpec) -> ReplicatedLinear:
        """Builds a linear layer that every tensor-parallel rank holds."""
        return ReplicatedLinear.from_spec(
            spec,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            product=self.product(spec.role),
            dtype=self.dtype,
            device=self.resolved_device,
        )

    def vocab_parallel_embedding(self, spec: VocabSpec) -> VocabParallelEmbedding:
        """Builds token embeddings."""
        backend = self.fused(vocab_embedding)
        return VocabParallelEmbedding.from_spec(
            spec,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            lookup=None if backend is None else KernelLookup(backend),
            dtype=self.dtype,
            device=self.resolved_device,
        )

    def register_state(
        self,
        module: nn.Module,
        shardings: Mapping[str, Sharding],
        name: str,
        update: Update,
        observation_shape: tuple[int, ...] | None = None,
    ) -> StepState | None:
        """Registers state that is not a parameter on a module, in at least float32.

        Args:
            module: Gets a buffer, and its entry in the attribute ``sharding``.
            shardings: Shardings of the mixer's state (`Mixer.state`). Without an entry for ``name``
                nothing is registered.
            name: Key in ``shardings``; its last part is the name of the buffer.
            update: Returns the value after a step, see `megatron_parallel.StepState`.
            observation_shape: Shape of an observation. Defaults to that of the value.

        Returns:
            The `StepState` that takes the module's observations, or None.
        """
        if name not in shardings:
            return None
        buffer = name.rpartition(".")[2]
        module.sharding = {**vars(module).get("sharding", {}), buffer: shardings[name]}  # type: ignore[assignment]
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        return StepState(
            module,
            buffer,
            self.mesh,
            update,
            observation_shape=observation_shape,
            dtype=exact,
            device=self.resolved_device,
        )

    def register_parameters(
        self, module: nn.Module, shardings: Mapping[str, Sharding], *names: str
    ) -> None:
        """Registers parameters without values on a module, and its sharding table.

        Args:
            module: Gets the attribute ``sharding``, and a parameter for each entry.
            shardings: Shardings of its parameters.
            *names: Names of parameters that it may have. Those without an entry are None.
        """
        module.sharding = dict(shardings)  # type: ignore[assignment]
        for name in dict.fromkeys((*shardings, *names)):
            parameter = None
            if name in shardings:
                shape = shardings[name].local_shape(self.mesh)
                parameter = nn.Parameter(
                    torch.empty(shape, dtype=self.dtype, device=self.resolved_device)
                )
            module.register_parameter(name, parameter)
