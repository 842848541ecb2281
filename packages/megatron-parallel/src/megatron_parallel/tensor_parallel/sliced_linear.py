"""Linear functions whose collectives run in slices of the sequence, each beside a product.

See `megatron_parallel.tensor_parallel.linear`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_parallel import _compat
from megatron_parallel.collectives.async_collective import start_all_gather, start_reduce_scatter
from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.tensor_parallel.linear_options import LinearOptions
from megatron_parallel.tensor_parallel.product import (
    Weights,
    as_rows,
    no_gradients,
    weight_gradient_requests,
)
from megatron_parallel.tensor_parallel.saving import Saved, save_for_backward, saved_of


class SlicedRow(Function):
    """The sequence-parallel row product in slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        """Returns this rank's part of the output; takes input, weights and options."""
        *weights, options = rest
        save_for_backward(ctx, Saved((x,), tuple(weights)), options.constant)
        ctx.options, ctx.gathered = options, None
        ctx.shape, ctx.shapes = x.shape, [weight.shape for weight in weights]
        count = divisor(len(x) // options.axis.size, options.num_slices)
        slices = x.reshape(options.axis.size, count, -1, *x.shape[1:])
        reducing = []
        for index in range(count):
            product = options.of_slice(slices[:, index].flatten(0, 1), weights)
            reducing.append(start_reduce_scatter(product, options.axis))
        return concatenate([each.wait() for each in reducing])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of input and weights."""
        saved, options = saved_of(ctx), ctx.options
        needs_x, requests = (
            _compat.gradient_wanted(ctx, 0),
            weight_gradient_requests(ctx, ctx.shapes),
        )
        # A split backward pass calls this twice with the same gradient; only the first one gathers.
        previous, dy = ctx.gathered or (None, None)
        if dy is None or previous is not grads[0]:
            dy = all_gather(grads[0], options.axis)
        later = any(ctx.needs_input_grad[1 : 1 + len(ctx.shapes)]) and not any(requests)
        ctx.gathered = (grads[0], dy) if later else None
        product, dx = options.product, None
        dweights: tuple[Tensor | None, ...] = no_gradients(len(ctx.shapes))
        if needs_x or any(requests):
            operand = product.gradient(as_rows(dy), of_input=needs_x, of_weights=any(requests))
            if needs_x:
                dx = product.input_gradient(operand, saved).view(ctx.shape)
            if any(requests):
                dweights = product.weight_gradients(operand, saved, requests)
        return dx, *dweights, None


def gather_in_slices(
    x: Tensor, weights: Weights, bias: Tensor | None, options: LinearOptions, count: int
) -> Tensor:
    """Returns the product with the gathered input, one slice after another."""
    axis = options.axis
    gathers = [start_all_gather(part, axis) for part in x.chunk(count)]
    width = weights[0].shape[:-1].numel()
    y = x.new_empty((axis.size, count, len(x) // count, *x.shape[1:-1], width))
    for index, gathering in enumerate(gathers):
        product = options.of_slice(gathering.wait(), weights, bias)
        y[:, index] = product.view(axis.size, -1, *product.shape[1:])
    return y.flatten(0, 2)


def concatenate(slices: list[Tensor]) -> Tensor:
    """Returns this rank's part from its slices in order."""
    return torch.cat(slices)


def divisor(length: int, limit: int) -> int:
    """Returns the largest number of equal slices, at most `limit`."""
    return next(count for count in range(min(limit, max(length, 1)), 0, -1) if length % count == 0)
