"""Output layers with their loss: memory, precision, and products of other kinds."""

from functools import partial
from typing import Any

import megatron_parallel.tensor_parallel.linear_cross_entropy as linear_cross_entropy
import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    collect_shardings,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.tensor_parallel import (
    IGNORE_INDEX,
    UNFUSED_CROSS_ENTROPY,
    LinearCrossEntropy,
    PlainProduct,
    WeightGradientRequest,
    multiply_matrix,
)
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from .test_vocabulary_loss import Block, drawn, step

TARGETS = torch.tensor([[0], [2], [IGNORE_INDEX], [1], [4], [3]])
DOUBLE = {"dtype": torch.float64}
BOTH = pytest.mark.parametrize("gradients", ["forward", "backward"])


def head_of(mesh: Mesh, **options: Any) -> ColumnParallelLinear:
    """Returns an output layer of 5 words without zeros."""
    head = ColumnParallelLinear(3, 5, mesh, **DOUBLE, **options)
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            parameter.copy_(drawn(number, *parameter.shape))
    return head


def losses_of(logits: Tensor) -> Tensor:
    """Returns the losses by torch."""
    return functional.cross_entropy(logits.flatten(0, 1), TARGETS[:, 0], reduction="none")[:, None]


class Twice(PlainProduct):
    """A product that multiplies its weight two times."""

    def forward(
        self, x: Tensor, weights: Any, bias: Any = None, multiply: Any = multiply_matrix
    ) -> Tensor:
        return multiply(x, weights[0], bias) + multiply(2 * x, weights[0], None)


def test_a_product_may_multiply_the_weight_of_a_fused_loss_twice(single: Mesh) -> None:
    head, x = head_of(single, product=Twice()), drawn(7, 6, 1, 3)
    loss = partial(LinearCrossEntropy(2), targets=TARGETS, true_vocab=5)
    expected = losses_of(functional.linear(3 * x, head.weight, head.bias))
    torch.testing.assert_close(head(x, loss=loss), expected)


class Memories(TorchDispatchMode):
    """Keeps every result with a number of elements, so that its memory is not used again."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.kept = elements, dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.numel() == self.elements:
            self.kept[found.untyped_storage().data_ptr()] = found
        return found


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 2)], ids=str)
def test_logits_of_all_slices_share_one_memory_and_their_copy_in_float32_another(
    single: Mesh, dtype: torch.dtype, count: int
) -> None:
    head = ColumnParallelLinear(3, 32, single, dtype=dtype)
    torch.nn.init.ones_(head.weight)
    loss = partial(LinearCrossEntropy(2), targets=TARGETS, true_vocab=32)
    with torch.no_grad(), Memories(2 * 32) as memories:
        head(torch.ones(6, 1, 3, dtype=dtype), loss=loss)
    assert len(memories.kept) == count


class Recorder(Block):
    """Records the dtypes of logits."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def forward(self, logits: Tensor, columns: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
        self.dtypes.add(logits.dtype)
        return super().forward(logits, columns, valid)


@BOTH
def test_a_block_gets_logits_in_16_bits_as_they_are(single: Mesh, gradients: str) -> None:
    loss = LinearCrossEntropy(5, gradients, Recorder())
    step(single, loss, False, 0.0, "plain", 0.0, True, torch.bfloat16)
    assert loss.block.dtypes == {torch.bfloat16}  # type: ignore[union-attr]


@BOTH
def test_a_bias_is_trained_beside_a_frozen_weight(single: Mesh, gradients: str) -> None:
    head, x = head_of(single), drawn(7, 6, 1, 3).requires_grad_()
    head.weight.requires_grad_(False)
    loss = partial(LinearCrossEntropy(2, gradients), targets=TARGETS, true_vocab=5)
    leaves = [x, head.bias]
    found = torch.autograd.grad(head(x, loss=loss).sum(), leaves)
    wanted = torch.autograd.grad(
        losses_of(functional.linear(x, head.weight, head.bias)).sum(), leaves
    )
    torch.testing.assert_close(found, wanted)


def tripled(dy: Tensor, x: Tensor, into: Any = None, *, first: bool = True) -> Tensor:
    """Computes three times the product, so that it is seen to be used."""
    found = 3 * dy.t() @ x
    if into is None:
        return found
    return into.copy_(found) if first else into.add_(found)  # type: ignore[no-any-return]


class Tripled(PlainProduct):
    """Passes its own multiplication of factors to the requests."""

    def wgrad(self, dy: Tensor, x: Tensor, weights: Any, requests: Any) -> Any:
        return (requests[0] and requests[0](dy, x, tripled),)


@BOTH
def test_a_fused_loss_uses_the_multiplication_of_the_product(single: Mesh, gradients: str) -> None:
    head, x = head_of(single, product=Tripled()), drawn(7, 6, 1, 3)
    loss = partial(LinearCrossEntropy(2, gradients), targets=TARGETS, true_vocab=5)
    (found,) = torch.autograd.grad(head(x, loss=loss).sum(), [head.weight])
    plain = losses_of(functional.linear(x, head.weight, head.bias)).sum()
    (wanted,) = torch.autograd.grad(plain, [head.weight])
    torch.testing.assert_close(found, 3 * wanted)


def test_a_gradient_is_added_to_its_bucket_by_the_multiplication_of_the_product(
    single: Mesh,
) -> None:
    head = head_of(single, product=Tripled())
    table = collect_shardings(head)
    buffers = GradientBuffers(head.named_parameters(), table, single, DataParallelConfig())
    assert fuse_gradient_accumulation([head], [buffers]).fused == ("weight",)
    inputs = drawn(7, 2, 6, 3)
    for x in inputs:
        head(x).sum().backward()
    buffers.finish()
    wanted = 3 * inputs.sum((0, 1)).expand(5, 3)
    torch.testing.assert_close(buffers.gradients()["weight"], wanted)


def test_losses_have_neither_smoothing_nor_bounds_by_default(single: Mesh) -> None:
    head, x = head_of(single), 10 * drawn(7, 6, 1, 3)
    expected = losses_of(functional.linear(x, head.weight, head.bias))
    for loss in (UNFUSED_CROSS_ENTROPY, LinearCrossEntropy(2)):
        found = head(x, loss=partial(loss, targets=TARGETS, true_vocab=5))
        torch.testing.assert_close(found, expected)


@BOTH
def test_gradients_in_16_bits_are_summed_a_few_rows_at_a_time(
    single: Mesh, monkeypatch: pytest.MonkeyPatch, gradients: str
) -> None:
    """21 words are not a multiple of 4 rows."""
    loss = LinearCrossEntropy(5, gradients)
    arguments = loss, False, 0.0, "plain", 0.0, True, torch.bfloat16
    ((_, whole),) = step(single, *arguments)["gradients"]["weight"]
    monkeypatch.setattr(linear_cross_entropy, "_ROWS", 4)
    ((_, parts),) = step(single, *arguments)["gradients"]["weight"]
    torch.testing.assert_close(parts, whole)


# -- on a GPU --------------------------------------------------------------------------------------


class OnGpu(Tensor):
    """A tensor in host memory that looks like one of a GPU."""

    is_cuda = True


class Elsewhere(Tensor):
    """A tensor in host memory whose device is a GPU."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def test_products_that_can_be_added_up_directly_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those in at least float32, and on a GPU those of bf16."""
    added: list[tuple[torch.dtype, torch.dtype, bool]] = []

    def add(into: Tensor, dy: Tensor, x: Tensor, *, first: bool) -> None:
        added.append((dy.dtype, into.dtype, first))

    monkeypatch.setattr(linear_cross_entropy, "add_product", add)
    for dtype, kind in (
        (torch.float64, Tensor),
        (torch.bfloat16, OnGpu),
        (torch.float16, OnGpu),
        (torch.bfloat16, Tensor),
    ):
        total = linear_cross_entropy._Sum(WeightGradientRequest(torch.Size((2, 3))))
        for _ in range(2):
            dy = torch.ones(4, 2, dtype=dtype).as_subclass(kind)
            assert total(dy, torch.ones(4, 3, dtype=dtype)) is None
    assert added == [
        *((torch.float64, torch.float64, first) for first in (True, False)),
        *((torch.bfloat16, torch.float32, first) for first in (True, False)),
    ]


@pytest.mark.parametrize(
    ("upstream", "targets", "factor"),
    [
        ([3.0, 9.0, 3.0], [1, IGNORE_INDEX, 2], 3.0),
        ([3.0, 9.0, 4.0], [1, IGNORE_INDEX, 2], None),
        ([3.0, 9.0, 4.0], [IGNORE_INDEX] * 3, 0.0),
    ],
)
def test_a_gpu_reports_losses_with_different_gradients_itself(
    upstream: list[float], targets: list[int], factor: float | None
) -> None:
    given = torch.tensor(upstream).as_subclass(Elsewhere)
    if factor is None:
        with pytest.raises(RuntimeError, match="gradients that differ between tokens with a label"):
            linear_cross_entropy._common_factor(given, torch.tensor(targets))
    else:
        found = linear_cross_entropy._common_factor(given, torch.tensor(targets))
        assert found.item() == factor
