"""Where a model is built, and how it computes there: one object for all of its modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

import torch
from megatron_parallel import Mesh, RecomputeConfig, Sharding, StepState
from megatron_parallel.sharding.step_state import Update
from megatron_parallel.tensor_parallel import (
    PLAIN,
    UNFUSED_CROSS_ENTROPY,
    ColumnParallelLinear,
    ColumnSpec,
    Product,
    RowParallelLinear,
    RowSpec,
    VocabParallelEmbedding,
    VocabSpec,
    VocabularyLoss,
)
from torch import nn


@dataclass(frozen=True, eq=False)
class Placement:
    """What the modules of a model have in common that is no property of the model.

    Attributes:
        mesh: where this rank stands, and over which ranks weights are cut.
        dtype: of the parameters; losses are float32, or float64 for a float64 model.
        device: of the parameters; None is the mesh's device. On the meta device a model has no
            values.
        sequence_parallel: between the tensor-parallel layers, cut activations along the sequence,
            ``[s/tp, b, h]``. Gradients of norms, position embeddings and row-parallel biases are
            then partial sums, which `megatron_parallel.GradientBuffers` adds up.
        tp_comm_overlap: with sequence parallelism, communicate in chunks while the forward pass
            computes (`megatron_parallel.tensor_parallel.overlap_forward`).
        recompute: what is computed again in the backward pass, and where the rest is kept; by
            default everything that autograd asks for is kept.
        dispatcher: how tokens get to the experts of a mixture of experts: ``allgather`` or
            ``alltoall``, see `megatron_parallel.expert_parallel.dispatch`.
        cp_comm_type: how attention goes over context-parallel ranks, for all layers or for each:
            ``p2p`` (ring), ``a2a`` (heads scattered), ``allgather``, or ``a2a+p2p``.
        products: what linear layers multiply by, by their role, as Megatron-Core names it:
            ``linear_qkv``, ``linear_proj``, ``linear_q`` and ``linear_kv`` of cross-attention,
            ``linear_fc1`` and ``linear_fc2`` of feed-forward layers and experts, ``output_layer``.
            Others are plain. `megatron_parallel.tensor_parallel.freeze_all_but_adapters` then
            freezes what is not trained.
        vocabulary_loss: output layer and loss as one operation; by default logits of all tokens are
            made.
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
    vocabulary_loss: VocabularyLoss = UNFUSED_CROSS_ENTROPY

    @classmethod
    def resolve(cls, placement: Union["Placement", Mesh]) -> "Placement":
        """Returns ``placement``, or what a mesh alone stands for: all else at its default."""
        return cls(placement) if isinstance(placement, Mesh) else placement

    @property
    def resolved_device(self) -> torch.device:
        """The device of the parameters."""
        return self.mesh.device if self.device is None else torch.device(self.device)

    @property
    def sequence_parallel_size(self) -> int:
        """Parts that the sequence is cut into between tensor-parallel layers."""
        return self.mesh.axis("tp").size if self.sequence_parallel else 1

    def product(self, role: str) -> Product:
        """Returns what the layers of a role multiply by."""
        return self.products.get(role, PLAIN)

    def column_parallel_linear(self, spec: ColumnSpec) -> ColumnParallelLinear:
        """Builds a column-parallel layer here."""
        return ColumnParallelLinear.from_spec(
            spec,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            product=self.product(spec.role),
            dtype=self.dtype,
            device=self.resolved_device,
        )

    def row_parallel_linear(self, spec: RowSpec) -> RowParallelLinear:
        """Builds a row-parallel layer here."""
        return RowParallelLinear.from_spec(
            spec,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            product=self.product(spec.role),
            dtype=self.dtype,
            device=self.resolved_device,
        )

    def vocab_parallel_embedding(self, spec: VocabSpec) -> VocabParallelEmbedding:
        """Builds token embeddings here."""
        cut = self.sequence_parallel
        return VocabParallelEmbedding.from_spec(
            spec, self.mesh, sequence_parallel=cut, dtype=self.dtype, device=self.resolved_device
        )

    def register_state(
        self,
        module: nn.Module,
        shardings: Mapping[str, Sharding],
        name: str,
        update: Update,
        observation_shape: tuple[int, ...] | None = None,
    ) -> StepState | None:
        """Gives a module state that is not a parameter, in at least float32.

        Args:
            module: gets a buffer, and its row in the attribute ``sharding``.
            shardings: of the mixer's state (`Mixer.state`); without a row for ``name`` there is
                none.
            name: in ``shardings``; its last part is that of the buffer.
            update: returns the value after a step, see `megatron_parallel.StepState`.
            observation_shape: shape of an observation. Defaults to that of the value.

        Returns:
            What takes the module's observations, or None.
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
        """Gives a module its sharding table, and parameters without values.

        Args:
            module: gets the attribute ``sharding``, and a parameter for each entry.
            shardings: of its parameters.
            *names: of parameters that it may have; those without an entry are None.
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
