"""Linear layers and embeddings cut over an axis of the mesh (Shoeybi et al. 2019, section 3).

A column-parallel layer cuts its outputs, a row-parallel layer its inputs. One after the other, they
need one sum over the ranks. With `sequence_parallel`, the activations outside the pair are cut
along the sequence, dim 0, and the sum becomes an all-gather before and a reduce-scatter after the
pair (Korthikanti et al. 2022, section 4.2.2). A call of a layer can override this, since a single
decoded token cannot be cut.

    x --copy/gather--> [ column-parallel -> activation -> row-parallel ] --reduce/scatter--> y

A layer computes its `product`, by default `x W^T`. The parameters that another `Product` adds are
parameters of the layer. On an axis of size 1, a forward pass is one `F.linear` or `F.embedding`.
Parameters are built without values (NaN); `initialize_parameters(model, seed=..., mesh=...)` fills
them by global name.
"""

from collections.abc import Callable
from math import nan
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from megatron_parallel.collectives.operations import reduce_from_axis, scatter_sequence
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import DEFAULT_INIT, Init, Sharding
from megatron_parallel.tensor_parallel.linear import column_parallel_linear, row_parallel_linear
from megatron_parallel.tensor_parallel.lookup import Lookup, select_rows
from megatron_parallel.tensor_parallel.product import PLAIN, Product
from megatron_parallel.tensor_parallel.product_layers import (
    add_product_parameters,
    bind_product,
    product_weights,
)
from megatron_parallel.tensor_parallel.specs import ColumnSpec, ReplicatedSpec, RowSpec, VocabSpec
from megatron_parallel.tensor_parallel.vocabulary_loss import OutputLayer

NUM_SLICES: Final = 4
"""Default number of slices in which `overlap_forward` communicates."""


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b` with the outputs cut over an axis.

    Maps `[..., in]` (`[s/n, ..., in]` with `sequence_parallel`) to `[..., *out]`, where dim `dim`
    of `out_features` is this rank's part.

    Args:
        in_features: Size of the last dim of the input.
        out_features: Size or shape of the output, such as `(groups, width)` for queries, keys and
            values or `(2, ffn)` for gate and up. The weight has shape `(*out_features, in)`.
        mesh: Mesh with the axis that cuts the layer.
        bias: Whether the layer has a bias, of shape `out_features`. Defaults to True.
        dim: Dim of `out_features` that is cut. Defaults to 0.
        fused_dim: Dim of `out_features` that enumerates fused weights.
        spill_dim: Dim of `out_features` that is also cut if there are more ranks than entries.
        padded: Size of the cut dim in memory if it is a padded vocabulary.
        axis: Name of the axis. Defaults to `"tp"`.
        sequence_parallel: Whether the input is cut along dim 0 and must be gathered.
        init: Initial values of the weight. The bias starts at zero.
        fused_sizes: Sizes of the weights that the last dim of `out_features` concatenates.
        product: Product that the layer computes. Defaults to `x W^T`.
        dtype: Data type of the parameters.
        device: Device of the parameters. Defaults to the device of the mesh.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        mesh: Mesh,
        *,
        bias: bool = True,
        dim: int = 0,
        fused_dim: int | None = None,
        spill_dim: int | None = None,
        padded: int | None = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
        init: Init = DEFAULT_INIT,
        fused_sizes: tuple[int, ...] = (),
        product: Product = PLAIN,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        out = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        cut = dim, fused_dim, spill_dim, padded, axis
        spec = ColumnSpec(in_features, out, bias, *cut, init, fused_sizes=fused_sizes)
        self.sharding = spec.shardings(sequence_parallel)
        self.product_parameters = add_product_parameters(self.sharding, product)
        _register(self, ("weight", "bias", *self.product_parameters), mesh, dtype, device)
        self.product = bind_product(self, product, mesh)
        self.axis = mesh.axis(axis)
        self.sequence_parallel = sequence_parallel
        self.num_slices = 1

    @classmethod
    def from_spec(
        cls,
        spec: ColumnSpec,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        product: Product = PLAIN,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> "ColumnParallelLinear":
        """Builds the layer that `spec` describes. Other arguments are those of the class."""
        where: Any = {"mesh": mesh, "dtype": dtype, "device": device}
        return cls(
            sequence_parallel=sequence_parallel, product=product, **where, **spec.arguments()
        )

    def forward(
        self,
        x: Float[Tensor, "... in"],
        *,
        sequence_parallel: bool | None = None,
        loss: Callable[[Tensor, OutputLayer], Tensor] | None = None,
        adds_bias: bool = True,
    ) -> Float[Tensor, "..."]:
        """Returns this rank's part of the output, or a loss.

        Args:
            x: Input.
            sequence_parallel: Whether the input is cut in this call. Defaults to the setting of the
                layer.
            loss: Function of input and layer, such as a `VocabularyLoss`, whose result is returned
                instead of the output. Needs outputs with one dim.
            adds_bias: Whether the output includes the bias. Otherwise the caller adds it.
        """
        cut = _cut(self, sequence_parallel), self.num_slices
        if loss is not None:
            weights = product_weights(self)
            return loss(x, OutputLayer(weights, self.axis, *cut, self.product, self.bias))
        bias = self.bias if adds_bias else None
        return column_parallel_linear(
            x, self.weight, bias, self.axis, *cut, self.product, product_weights(self)[1:]
        )

    def extra_repr(self) -> str:
        """Returns the global shape of the weight and how it is cut."""
        return _repr(self.sharding["weight"], self.axis, self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """`y = x W^T + b` with the inputs cut over an axis.

    Maps `[..., in/n]` to `[..., out]`, summed over the axis. With `sequence_parallel`, the output
    is this rank's part of the sequence, `[s/n, ..., out]`, and the gradient of the bias is
    `partial` over the axis: `GradientBuffers` sums it once per step. The bias is added once, after
    the sum. Arguments are those of `ColumnParallelLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        *,
        bias: bool = True,
        axis: str = "tp",
        sequence_parallel: bool = False,
        init: Init = DEFAULT_INIT,
        product: Product = PLAIN,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        spec = RowSpec(in_features, out_features, bias, axis, init)
        self.sharding = spec.shardings(sequence_parallel)
        self.product_parameters = add_product_parameters(self.sharding, product)
        _register(self, ("weight", "bias", *self.product_parameters), mesh, dtype, device)
        self.product = bind_product(self, product, mesh)
        self.axis = mesh.axis(axis)
        self.sequence_parallel = sequence_parallel
        self.num_slices = 1

    @classmethod
    def from_spec(
        cls,
        spec: RowSpec,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        product: Product = PLAIN,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> "RowParallelLinear":
        """Builds the layer that `spec` describes. Other arguments are those of the class."""
        where: Any = {"mesh": mesh, "dtype": dtype, "device": device}
        return cls(
            sequence_parallel=sequence_parallel, product=product, **where, **spec.arguments()
        )

    def forward(
        self, x: Float[Tensor, "... part"], *, sequence_parallel: bool | None = None
    ) -> Float[Tensor, "... out"]:
        """Returns the summed output, or this rank's part of its sequence.

        Args:
            x: This rank's part of the input.
            sequence_parallel: Whether the output is cut in this call. Defaults to the setting of
                the layer.
        """
        cut = _cut(self, sequence_parallel), self.num_slices
        own: Any = {"product": self.product, "added_weights": product_weights(self)[1:]}
        return row_parallel_linear(x, self.weight, self.axis, *cut, bias=self.bias, **own)

    def extra_repr(self) -> str:
        """Returns the global shape of the weight and how it is cut."""
        return _repr(self.sharding["weight"], self.axis, self.sequence_parallel)


class ReplicatedLinear(nn.Module):
    """`y = x W^T + b` with the whole weight on every rank of an axis, without communication.

    Maps `[..., in]` to `[..., out]`. With `sequence_parallel`, the input is this rank's part of the
    sequence, and the gradients of weight and bias are `partial` over the axis: `GradientBuffers`
    sums them once per step. Without it, all ranks compute the same. Arguments are those of
    `ColumnParallelLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        *,
        bias: bool = True,
        axis: str = "tp",
        sequence_parallel: bool = False,
        init: Init = DEFAULT_INIT,
        product: Product = PLAIN,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        spec = ReplicatedSpec(in_features, out_features, bias, axis, init)
        self.sharding = spec.shardings(sequence_parallel)
        self.product_parameters = add_product_parameters(self.sharding, product)
        _register(self, ("weight", "bias", *self.product_parameters), mesh, dtype, device)
        self.product = bind_product(self, product, mesh)

    @classmethod
    def from_spec(
        cls,
        spec: ReplicatedSpec,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        product: Product = PLAIN,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> "ReplicatedLinear":
        """Builds the layer that `spec` describes. Other arguments are those of the class."""
        where: Any = {"mesh": mesh, "dtype": dtype, "device": device}
        return cls(
            sequence_parallel=sequence_parallel, product=product, **where, **spec.arguments()
        )

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Returns the output of the tokens of `x`."""
        return self.product.forward(x, product_weights(self), self.bias)

    def extra_repr(self) -> str:
        """Returns the shape of the weight."""
        return f"{self.sharding['weight'].shape}"


class VocabParallelEmbedding(nn.Module):
    """Token embeddings with the vocabulary cut over an axis.

    Maps token ids `[...]` to `[..., h]`; with `sequence_parallel`, `[s, ...]` to `[s/n, ..., h]`.

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Hidden size.
        mesh: Mesh with the axis that cuts the vocabulary.
        padded: Size of the vocabulary in memory. Padded rows are zero and not stored.
        axis: Name of the axis. Defaults to `"tp"`.
        sequence_parallel: Whether the output is cut along dim 0.
        init: Initial values of the weight.
        lookup: Reads rows. Defaults to torch's embedding.
        dtype: Data type of the weight.
        device: Device of the weight. Defaults to the device of the mesh.

    Attributes:
        product: Product of `output`, if the embedding is also the output layer, else None.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: Mesh,
        *,
        padded: int | None = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
        init: Init = DEFAULT_INIT,
        lookup: Lookup | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        spec = VocabSpec(num_embeddings, embedding_dim, padded, axis, init)
        self.sharding = spec.shardings(sequence_parallel)
        _register(self, ("weight",), mesh, dtype, device)
        self.axis = mesh.axis(axis)
        self.sequence_parallel = sequence_parallel
        self.lookup = lookup
        self.product: Product | None = None
        self.product_parameters = ("weight",)

    @classmethod
    def from_spec(
        cls,
        spec: VocabSpec,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        lookup: Lookup | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> "VocabParallelEmbedding":
        """Builds the layer that `spec` describes. Other arguments are those of the class."""
        where: Any = {"mesh": mesh, "dtype": dtype, "device": device}
        return cls(sequence_parallel=sequence_parallel, lookup=lookup, **where, **vars(spec))

    def forward(
        self, tokens: Int[Tensor, "..."], *, sequence_parallel: bool | None = None
    ) -> Float[Tensor, "... h"]:
        """Returns the embeddings of `tokens`, or of this rank's part of their sequence.

        Args:
            tokens: Token ids of the whole sequence.
            sequence_parallel: Whether the output is cut in this call. Defaults to the setting of
                the layer.
        """
        rows = self.weight.shape[0]
        start = self.axis.index * rows
        if self.lookup is not None:
            partial = self.lookup.forward(tokens, self.weight, start)
        elif self.axis.size == 1:
            partial = select_rows(self.weight, tokens)
        else:
            local = tokens - start
            not_here = (local < 0) | (local >= rows)
            partial = select_rows(self.weight, local.masked_fill(not_here, 0))
            partial = partial.masked_fill(not_here.unsqueeze(-1), 0.0)
        leave = scatter_sequence if _cut(self, sequence_parallel) else reduce_from_axis
        return leave(partial, self.axis)

    def output(
        self,
        x: Float[Tensor, "... h"],
        num_slices: int = 1,
        *,
        sequence_parallel: bool | None = None,
        loss: Callable[[Tensor, OutputLayer], Tensor] | None = None,
        bias: Float[Tensor, " part"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Returns this rank's part of the logits, as an output layer with tied weights, or a loss.

        The caller sets `product`, so that gradient accumulation can be fused here too.

        Args:
            x: Input, `[s, ..., h]`, or `[s/n, ..., h]` with `sequence_parallel`.
            num_slices: As for `column_parallel_linear`.
            sequence_parallel: Whether the input is cut in this call. Defaults to the setting of the
                layer.
            loss: As for `ColumnParallelLinear`.
            bias: This rank's part of a bias of the logits. Defaults to none.
        """
        cut, product = (_cut(self, sequence_parallel), num_slices), self.product or PLAIN
        if loss is not None:
            return loss(x, OutputLayer((self.weight,), self.axis, *cut, product, bias))
        return column_parallel_linear(x, self.weight, bias, self.axis, *cut, product)

    def extra_repr(self) -> str:
        """Returns the global shape of the weight and how it is cut."""
        return _repr(self.sharding["weight"], self.axis, self.sequence_parallel)


def overlap_forward(module: nn.Module, num_slices: int = NUM_SLICES) -> None:
    """Makes the sequence-parallel layers of a module overlap communication and computation.

    Corresponds to `--tp-comm-overlap` of Megatron-LM. Layers without sequence parallelism and code
    compiled with `torch.compile` do not change.

    Args:
        module: Module with parallel layers.
        num_slices: Maximum number of slices in which each layer communicates.
    """
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.num_slices = num_slices


def _cut(
    layer: ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding, given: bool | None
) -> bool:
    """Returns whether a call cuts the sequence. Defaults to the setting of the layer."""
    return layer.sequence_parallel if given is None else given


def _register(
    layer: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear | VocabParallelEmbedding,
    names: tuple[str, ...],
    mesh: Mesh,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> None:
    """Registers the parameters of a layer without values; names without a sharding are None."""
    where = mesh.device if device is None else device
    for name in dict.fromkeys(names):
        parameter = None
        if name in layer.sharding:
            shape = layer.sharding[name].local_shape(mesh)
            parameter = nn.Parameter(torch.full(shape, nan, dtype=dtype, device=where))
        layer.register_parameter(name, parameter)


def _repr(sharding: Sharding, axis: Axis, sequence_parallel: bool) -> str:
    text = f"{sharding.shape}, dim {sharding.dim} over {axis.name} {axis.size}"
    return text + (", sequence parallel" if sequence_parallel else "")
