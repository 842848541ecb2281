"""Vocab-parallel cross entropy against torch's, in float64, with padded and cut vocabularies."""

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout, vocab_parallel_cross_entropy
from megatron_parallel.tensor_parallel import IGNORED_TARGET
from megatron_parallel.testing import WorkerPool
from torch.nn import functional

VOCAB = 37


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(4, 3, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (4, 3), generator=generator)
    targets[0, :2] = torch.tensor([0, VOCAB - 1])
    targets[3, 1] = IGNORED_TARGET
    upstream = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    return logits.to(dtype), targets, upstream


def expected(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets, upstream = problem(dtype)
    exact = logits.double().requires_grad_()
    loss = functional.cross_entropy(exact.flatten(0, 1), targets.flatten(), reduction="none")
    loss = loss.view_as(targets)
    loss.backward(upstream)
    assert exact.grad is not None
    return loss.detach(), exact.grad


def cut(mesh: Mesh, padded: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of this rank's columns; padding holds the largest logits of all."""
    logits, targets, upstream = problem(dtype)
    axis = mesh.axis("tp")
    filled = functional.pad(logits, (0, padded - VOCAB), value=50.0)
    part = filled.chunk(axis.size, -1)[axis.index].clone().requires_grad_()
    before = part.detach().clone()
    loss = vocab_parallel_cross_entropy(part, targets, axis, VOCAB)
    loss.backward(upstream.to(loss.dtype))
    assert torch.equal(part.detach(), before) and part.grad is not None
    return loss.detach(), part.grad


def check(results: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> None:
    loss, grad = expected(dtype)
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
    layout = ParallelLayout(tp=ranks)  # of 4 x 16 columns the last rank's are all padding
    check(worker_pool.run_mesh(layout, cut, padded, dtype, ranks=ranks), dtype)


def test_a_target_outside_the_vocabulary_shows(single: Mesh) -> None:
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
