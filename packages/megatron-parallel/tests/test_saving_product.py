"""Products that choose what they save, with gradients of weights added to buffers."""

import torch
from megatron_parallel.tensor_parallel import AccumulatingProduct, PlainProduct
from megatron_parallel.tensor_parallel.saving import Saved, SavingProduct


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
