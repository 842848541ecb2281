"""Products that choose what they save, with gradients of weights added to buffers."""

from typing import ClassVar

import pytest
import torch
from megatron_parallel import RowParallelLinear
from megatron_parallel.tensor_parallel import (
    AccumulatingProduct,
    ConstantWeights,
    PlainProduct,
    Saved,
    SavingProduct,
    differentiate_steps,
    multiply_matrix,
)
from torch import nn


class HalvesInput(PlainProduct, SavingProduct):
    """Saves half of the input, and doubles the gradient of the weight."""

    def forward_saving(self, x, weights, bias, multiply, **options):
        """Returns the product, half of the input, and the weight."""
        return multiply(x, weights[0], bias), Saved((x / 2,), tuple(weights))

    def gradient(self, dy, *, of_input, of_weights):
        """Returns the gradient of the output."""
        return dy

    def input_gradient(self, gradient, saved):
        """Returns `dy W`."""
        return gradient @ saved.weights[0]

    def weight_gradients(self, gradient, saved, requests):
        """Returns `dy^T x`, or what the request does with it."""
        return (requests[0] and requests[0](gradient, 2 * saved.input[0]),)


def test_gradients_of_a_saving_product_are_added_to_buffers():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    buffer = torch.ones(5, 4, dtype=torch.float64)

    def accumulate(dy, x, *, must_return, multiply=None):
        buffer.add_(dy.t() @ x)

    product = AccumulatingProduct(HalvesInput(), {0: accumulate})
    dy = torch.randn(3, 5, dtype=torch.float64)
    product.forward(x, (weight,)).backward(dy)
    assert weight.grad is None
    torch.testing.assert_close(buffer, 1 + dy.t() @ x.detach())
    torch.testing.assert_close(x.grad, dy @ weight.detach())


class Converted(HalvesInput):
    """Records in which order it is held, converted and released."""

    def __init__(self, log, name):
        object.__setattr__(self, "log", log)
        object.__setattr__(self, "name", name)

    def hold_weights(self, *, compiled=False):
        """Records the begin."""
        self.log.append((self.name, "hold", compiled))

    def constant_weights(self, weights):
        """Records the weights that are converted."""
        self.log.append((self.name, *map(len, weights)))
        return ()

    def release_weights(self):
        """Records the end."""
        self.log.append((self.name, "release"))


def test_weights_are_held_for_a_time_and_released_after_an_error(single):
    log = []
    products = Converted(log, "first"), AccumulatingProduct(Converted(log, "second"), {})
    layers = [RowParallelLinear(2, 3 + i, single) for i in range(3)]
    for layer, product in zip(layers, products, strict=False):
        layer.product = product
    model = nn.ModuleList([*layers, nn.Linear(2, 2)])
    constant = ConstantWeights([model])
    assert constant.exist and not ConstantWeights([layers[2]]).exist
    with constant.held():
        assert log == [("first", "hold", False), ("second", "hold", False)]
    assert log[2:] == [("first", "release"), ("second", "release")]
    log.clear()
    with pytest.raises(KeyError), constant.held(compiled=True):
        assert log == [
            ("first", "hold", True),
            ("second", "hold", True),
            ("first", 3),
            ("second", 4),
        ]
        raise KeyError
    assert log[4:] == [("first", "release"), ("second", "release")]


class Asked(HalvesInput):
    """Records whether gradients of weights are needed."""

    asked: ClassVar[list[bool]] = []

    def forward_saving(self, x, weights, bias, multiply, **options):
        """Returns the product, and what it needs."""
        self.asked.append(options["saves"])
        return super().forward_saving(x, weights, bias, multiply, **options)


def test_the_input_is_saved_only_if_a_weight_is_trained():
    Asked.asked.clear()
    x, weight = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2)
    for trained, enabled in ((True, True), (False, True), (True, False)):
        with torch.set_grad_enabled(enabled):
            y = differentiate_steps(
                Asked(), x, (weight.clone().requires_grad_(trained),), None, multiply_matrix
            )
        assert y.tolist() == [[2, 2, 2]]
    assert Asked.asked == [True, False, False]
