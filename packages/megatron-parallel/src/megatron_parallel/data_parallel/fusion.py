"""Gradient accumulation inside matrix products: `main_gradient += dy^T x` in one operation.

    fusion = fuse_gradient_accumulation(chunks, buffers)
    print(fusion)             # which weights are fused, and why others are not

The `Product` of a layer is replaced by an `AccumulatingProduct`, which adds the gradients of its
weights into the buffers and returns none to autograd. That saves a matrix as large as the weight
and two passes over it in every micro-batch. Megatron-LM calls this gradient accumulation fusion.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from megatron_parallel._compat.imagined import has_no_values
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_parallel.data_parallel.buffers import GradientBuffers
from megatron_parallel.tensor_parallel.added_product import (
    add_product as add_product,  # noqa: PLC0414 - a public name of this package
)
from megatron_parallel.tensor_parallel.differentiation import AccumulatingProduct
from megatron_parallel.tensor_parallel.layers import VocabParallelEmbedding
from megatron_parallel.tensor_parallel.lookup import AccumulatingLookup, Lookup
from megatron_parallel.tensor_parallel.product import (
    FactorProduct,
    LayerProduct,
    Product,
    multiply_factors,
)
from megatron_parallel.tensor_parallel.product_layers import is_product_layer, product_weights


@runtime_checkable
class AddProduct(Protocol):
    """An operation that adds a product to a matrix."""

    def __call__(
        self,
        into: Float[Tensor, "out in"],
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        *,
        first: bool,
    ) -> None:
        """Adds `dy^T x` to `into`, in place. If it is the `first` product, overwrites `into`."""


class ProductOp(NamedTuple):
    """The operation that is fused.

    Attributes:
        add: The operation.
        why_unsupported: `why_unsupported(dtype, main_dtype, device)` returns why the operation does
            not run there, or None.
    """

    add: AddProduct
    why_unsupported: Callable[[torch.dtype, torch.dtype, torch.device], str | None]


def why_product_unsupported(
    dtype: torch.dtype, main: torch.dtype, device: torch.device
) -> str | None:
    """Returns why torch cannot add products of `dtype` in `main`, or None.

    Tries a product of 16 x 16 on the device.
    """
    if dtype == main:
        return None
    pair = f"products of {_name(dtype)} added up in {_name(main)} on {device.type}"
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    into = torch.empty(16, 16, dtype=main, device=device)
    try:
        add_product(into, ones, ones, first=True)
        add_product(into, ones, ones, first=False)
    except (NotImplementedError, RuntimeError):
        return f"torch {torch.__version__} has no {pair}"
    if has_no_values(into):  # on an imagined device nothing can be compared
        return None
    return None if bool((into == 32).all()) else f"torch {torch.__version__} has wrong {pair}"


TORCH: Final = ProductOp(add_product, why_product_unsupported)
"""The operation of torch itself."""


class GradientFusion(NamedTuple):
    """The weights whose gradient accumulation is fused, by global name, and why others are not.

    Attributes:
        fused: Weights whose gradients are added by products.
        not_fused: Weights of layers that support fusion, with the reason why they are not fused.
        disabled_reason: Why fusion is disabled; empty if it is enabled.
    """

    fused: tuple[str, ...] = ()
    not_fused: Mapping[str, str] = {}
    disabled_reason: str = ""

    def __str__(self) -> str:
        if self.disabled_reason:
            return f"gradient accumulation is not fused: {self.disabled_reason}"
        count = len(self.fused) + len(self.not_fused)
        line = f"gradient accumulation is fused for {len(self.fused)} of {count} weight matrices"
        reasons = Counter(self.not_fused.values())
        return line + "".join(f"; not for {n}: {reason}" for reason, n in reasons.items())


def fuse_gradient_accumulation(
    modules: Iterable[nn.Module],
    buffers: Iterable[GradientBuffers],
    op: ProductOp = TORCH,
) -> GradientFusion:
    """Lets the layers of `modules` add the gradients of their weights to main gradients themselves.

    Applies to the product of every `ProductLayer` in the modules, for weights whose gradients are
    in `buffers` (those of frozen weights are not), if the operation supports them.
    `GradientBuffers.close` ends the fusion. Code compiled by torch.compile leaves gradients to
    autograd.

    Args:
        modules: Model chunks of this rank.
        buffers: The buffers of their parameters.
        op: The operation that adds products.
    """
    owners = {
        id(parameter): (bucket, name)
        for each in buffers
        for bucket in each.buckets
        for name, parameter in bucket.parameters.items()
    }
    fused: list[str] = []
    refused: dict[str, str] = {}
    reasons: dict[tuple[Any, ...], str | None] = {}
    modules = list(modules)
    for layer in (layer for module in modules for layer in module.modules()):
        if not is_product_layer(layer) or layer.sharding["weight"].experts:
            continue
        added = {}
        for number, weight in enumerate(product_weights(layer)):
            matrix = layer.sharding[layer.product_parameters[number]].matrix
            if id(weight) not in owners or matrix is None:
                continue
            bucket, name = owners[id(weight)]
            kind = weight.dtype, bucket.plan.dtype, bucket.plan.device
            if kind not in reasons:
                reasons[kind] = op.why_unsupported(*kind)
            reason = reasons[kind]
            product = _unfused(layer.product)
            if isinstance(product, LayerProduct) and not product.uses_requests:
                reason = "their product computes the gradient itself"
            if reason is None:
                added[number] = Accumulator(bucket, name, op.add)
                fused.append(name)
            else:
                refused[name] = reason
        if added:
            layer.product = AccumulatingProduct(_unfused(layer.product), added)
    fused += _fuse_lookups(modules, owners)
    return GradientFusion(tuple(dict.fromkeys(fused)), refused)


def _fuse_lookups(
    modules: Iterable[nn.Module], owners: Mapping[int, tuple[Bucket, str]]
) -> list[str]:
    """Lets the lookups of embeddings add their gradients; returns the names of the weights."""
    fused = []
    for layer in (layer for module in modules for layer in module.modules()):
        if not isinstance(layer, VocabParallelEmbedding) or layer.lookup is None:
            continue
        if id(layer.weight) not in owners:
            continue
        bucket, name = owners[id(layer.weight)]
        own = layer.lookup
        own = own.lookup if isinstance(own, AccumulatingLookup) else own
        start = layer.axis.index * len(layer.weight)
        layer.lookup = AccumulatingLookup(own, LookupAccumulator(bucket, name, own, start))
        fused.append(name)
    return fused


def _unfused(product: Product) -> Product:
    """Returns a product without the buffers that it was fused with before."""
    return product.product if isinstance(product, AccumulatingProduct) else product


class Accumulator:
    """Adds the gradient of one weight to its bucket; an `AccumulateGradient`."""

    def __init__(self, bucket: Bucket, name: str, add: AddProduct) -> None:
        self._bucket, self._name, self._add = bucket, name, add
        bucket.mark_fused(name)

    def gradient(self, dy: Tensor, x: Tensor, multiply: FactorProduct | None = None) -> Tensor:
        """Returns the gradient of the weight."""
        return multiply_factors(dy, x, multiply)

    def __call__(
        self,
        dy: Float[Tensor, "..."],
        x: Shaped[Tensor, "..."],
        *,
        must_return: bool,
        multiply: FactorProduct | None = None,
    ) -> Tensor | None:
        """Adds `dy^T x`; returns the gradient for autograd, if any."""
        bucket, shape = self._bucket, self._bucket.parameters[self._name].shape
        if bucket.closed or (must_return and not bucket.in_weight_backward):
            # Requested by other code, not for the buffers.
            return self.gradient(dy, x, multiply).view(shape)
        into, first = bucket.accumulation_target(self._name)
        matrix = into.view(-1, shape[-1])
        if multiply is None:
            self._add(matrix, dy, x, first=first)
        else:
            multiply(dy, x, matrix, first=first)
        return bucket.dummy_gradient.expand(shape) if must_return else None


class LookupAccumulator(Accumulator):
    """Adds the gradient of the weight of an embedding to its bucket; an `AccumulateGradient`."""

    def __init__(self, bucket: Bucket, name: str, lookup: Lookup, start: int) -> None:
        def add(into: Tensor, dy: Tensor, x: Tensor, *, first: bool) -> None:
            lookup.add_gradient(into, dy, x, start, first=first)

        super().__init__(bucket, name, add)

    def gradient(self, dy: Tensor, x: Tensor, multiply: FactorProduct | None = None) -> Tensor:
        """Returns the gradient of the weight."""
        into = torch.empty_like(self._bucket.parameters[self._name], requires_grad=False)
        self._add(into, dy, x, first=True)
        return into


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
