"""Vocab-parallel cross entropy against torch in float64, with padded and cut vocabularies."""

from typing import Any
from unittest import mock

import megatron_parallel.tensor_parallel.cross_entropy as cross_entropy
import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout, vocab_parallel_cross_entropy
from megatron_parallel.recompute import count_saved_activations
from megatron_parallel.tensor_parallel import IGNORE_INDEX
from megatron_parallel.testing import WorkerPool
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB = 37


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(4, 3, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (4, 3), generator=generator)
    targets[0, :2] = torch.tensor([0, VOCAB - 1])
    targets[3, 1] = IGNORE_INDEX
    upstream = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    return logits.to(dtype), targets, upstream


def expected(
    dtype: torch.dtype, smoothing: float = 0.0, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets, upstream = problem(dtype)
    exact = logits.double().requires_grad_()
    bounded = torch.tanh(exact / softcap) * softcap if softcap else exact
    loss = functional.cross_entropy(
        bounded.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    loss = loss.view_as(targets)
    loss.backward(upstream)
    assert exact.grad is not None
    return loss.detach(), exact.grad


def cut(
    mesh: Mesh,
    padded: int,
    dtype: torch.dtype,
    smoothing: float = 0.0,
    softcap: float = 0.0,
    compiles: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns loss and gradient of this rank's columns; the padding has the largest logits.

    With `compiles` it runs, eagerly, what a compiler would trace.
    """
    logits, targets, upstream = problem(dtype)
    axis = mesh.axis("tp")
    filled = functional.pad(logits, (0, padded - VOCAB), value=50.0)
    part = filled.chunk(axis.size, -1)[axis.index].clone().requires_grad_()
    before = part.detach().clone()
    options = {"label_smoothing": smoothing, "softcap": softcap}
    with mock.patch.object(torch.compiler, "is_compiling", lambda: compiles):
        loss = vocab_parallel_cross_entropy(part, targets, axis, VOCAB, **options)
    loss.backward(upstream.to(loss.dtype))
    assert torch.equal(part.detach(), before) and part.grad is not None
    return loss.detach(), part.grad


def check(
    results: list[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    smoothing: float = 0.0,
    softcap: float = 0.0,
) -> None:
    loss, grad = expected(dtype, smoothing, softcap)
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
    found = torch.cat([part for _, part in results], -1)
    assert found.dtype is dtype and not found[..., VOCAB:].any()
    assert (found[..., :VOCAB].double() - grad).abs().max() < tolerance
    for rank_loss, _ in results:
        assert rank_loss.dtype is torch.promote_types(dtype, torch.float32)
        assert (rank_loss.double() - loss).abs().max() < 20 * min(tolerance, 2e-6)
        assert rank_loss[3, 1] == 0
    assert not found[3, 1].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [VOCAB, 48])
def test_one_rank_equals_torch(single: Mesh, padded: int, dtype: torch.dtype) -> None:
    check([cut(single, padded, dtype)], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ranks", "padded"), [(2, 38), (2, 48), (3, 48), (4, 64)])
def test_ranks_equal_torch(
    worker_pool: WorkerPool, ranks: int, padded: int, dtype: torch.dtype
) -> None:
    layout = ParallelLayout(tp=ranks)  # of 4 x 16 columns, those of the last rank are all padding
    found = worker_pool.run_mesh(layout, both_cut, padded, dtype, ranks=ranks)
    for results in zip(*found, strict=True):
        check(list(results), dtype)


def both_cut(mesh: Mesh, padded: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Returns the results of `cut`, and those of the code for a compiler."""
    return [cut(mesh, padded, dtype, compiles=compiles) for compiles in (False, True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, 0.0), (0.1, 0.0), (0.1, 3.0)])
def test_code_for_a_compiler_equals_torch(
    single: Mesh, smoothing: float, softcap: float, dtype: torch.dtype
) -> None:
    for padded in (VOCAB, 48):
        check([cut(single, padded, dtype, smoothing, softcap, True)], dtype, smoothing, softcap)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [VOCAB, 48])
def test_label_smoothing_equals_torch(single: Mesh, padded: int, dtype: torch.dtype) -> None:
    check([cut(single, padded, dtype, 0.1)], dtype, 0.1)


@pytest.mark.parametrize(("ranks", "padded"), [(2, 48), (4, 64)])
def test_label_smoothing_counts_the_whole_unpadded_vocabulary_on_every_rank(
    worker_pool: WorkerPool, ranks: int, padded: int
) -> None:
    layout = ParallelLayout(tp=ranks, dp=1)
    check(worker_pool.run_mesh(layout, cut, padded, torch.float64, 0.1), torch.float64, 0.1)


def local_vocabulary(mesh: Mesh) -> float:
    """Returns the error of the loss if a rank divides by its own columns, a past defect."""
    columns = 48 // mesh.axis("tp").size
    with mock.patch.object(cross_entropy, "_share", lambda smoothing, _: smoothing / columns):
        loss, _ = cut(mesh, 48, torch.float64, 0.1)
    return float((loss - expected(torch.float64, 0.1)[0]).abs().max())


def test_smoothing_over_the_local_vocabulary_is_detected(worker_pool: WorkerPool) -> None:
    assert min(worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), local_vocabulary)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bounded_logits_equal_torch(single: Mesh, dtype: torch.dtype) -> None:
    check([cut(single, 48, dtype, 0.1, 3.0)], dtype, 0.1, 3.0)


def test_every_rank_bounds_its_logits(worker_pool: WorkerPool) -> None:
    found = worker_pool.run_mesh(ParallelLayout(tp=3), cut, 48, torch.float64, 0.0, 3.0, ranks=3)
    check(found, torch.float64, softcap=3.0)


def test_label_smoothing_out_of_range_is_refused(single: Mesh) -> None:
    with pytest.raises(LayoutError, match=r"label_smoothing 1.0 is not in 0 <= e < 1"):
        cut(single, VOCAB, torch.float64, 1.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_only_one_buffer_of_the_size_of_the_logits_is_saved(single: Mesh, smoothing: float) -> None:
    logits = torch.randn(64, 512, requires_grad=True)
    targets = torch.randint(0, 500, (64,))
    with count_saved_activations(torch.nn.Module()) as kept:
        vocab_parallel_cross_entropy(
            logits, targets, single.axis("tp"), 500, label_smoothing=smoothing
        )
    assert kept.nbytes == logits.nbytes + 64 * (8 + 1 + 1)  # and three numbers per token


def test_a_target_outside_the_vocabulary_has_infinite_loss(single: Mesh) -> None:
    axis = single.axis("tp")
    logits = torch.zeros(2, 8)
    for target in (7, 8, -1):
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, target]), axis, 7)
        assert loss[0].isfinite() and loss[1] == torch.inf


def test_large_logits_do_not_overflow(single: Mesh) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1]), single.axis("tp"), 3)
    assert loss.item() == 1e4


def test_a_second_backward_pass_is_refused(single: Mesh) -> None:
    logits = torch.zeros(2, 8, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2]), single.axis("tp"), 8).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Passes(TorchDispatchMode):
    """Counts operations on every element of tensors as large as the logits, and new such tensors.

    Views have none, and `gather` and `scatter_add_` read the target's element alone.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.reads, self.allocations = size, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [a for a in args if isinstance(a, torch.Tensor) and a.numel() == self.size]
        found = func(*args, **(kwargs or {}))
        of_few = ("alias", "slice", "detach", "gather", "scatter_add_")
        self.reads += bool(inputs) and func.overloadpacket.__name__ not in of_few
        known = {a.data_ptr() for a in inputs}
        if isinstance(found, torch.Tensor) and found.numel() == self.size:
            self.allocations += found.data_ptr() not in known
        return found


@pytest.mark.parametrize("overwrites", [False, True])
def test_logits_are_read_four_times_and_copied_at_most_once(single: Mesh, overwrites: bool) -> None:
    leaf = torch.randn(16, 64, requires_grad=True)
    logits = leaf * 1.0
    with Passes(logits.numel()) as passes:
        loss = vocab_parallel_cross_entropy(
            logits, torch.arange(16), single.axis("tp"), 64, overwrites=overwrites
        )
        torch.autograd.grad(loss.sum(), logits)
    # The largest logit, the softmax, the largest probability; the gradient.
    assert (passes.reads, passes.allocations) == (4, 0 if overwrites else 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_overwritten_logits_give_the_same_loss_and_gradient(
    single: Mesh, smoothing: float, dtype: torch.dtype
) -> None:
    logits, targets, upstream = problem(dtype)
    padded = functional.pad(logits, (0, 11), value=50.0)
    found = []
    for overwrites in (False, True):
        leaf = padded.clone().requires_grad_()
        made = leaf * 1.0
        loss = vocab_parallel_cross_entropy(
            made,
            targets,
            single.axis("tp"),
            VOCAB,
            label_smoothing=smoothing,
            overwrites=overwrites,
        )
        (grad,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
        found.append((loss.detach(), grad))
    check([found[1]], dtype, smoothing)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-6, atol=0)


def test_overwriting_logits_that_another_function_saved_is_detected(single: Mesh) -> None:
    logits = torch.randn(4, 8, requires_grad=True).exp()  # exp saves its result
    loss = vocab_parallel_cross_entropy(
        logits, torch.arange(4), single.axis("tp"), 8, overwrites=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
