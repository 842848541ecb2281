"""The selection of keys by an indexer."""

import pytest
import torch
from megatron_kernels import index_scores, select_keys

F64 = torch.float64


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_scores_by_hand(backend: str) -> None:
    q = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=F64).view(1, 1, 2, 2)
    k = torch.tensor([[3.0, -1.0], [-4.0, 5.0], [1.0, 1.0]], dtype=F64).view(3, 1, 2)
    weights = torch.tensor([0.5, -1.0], dtype=F64).view(1, 1, 2)
    # Heads: relu of (3, -4, 1) and of (-2, 10, 2).
    found = index_scores(q, k, weights, backend=backend)
    assert found.tolist() == [[[1.5, -10.0, -1.5]]]


def test_the_best_allowed_keys_are_selected_and_the_first_of_equal_ones() -> None:
    scores = torch.tensor([[[9.0, 1.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0, 7.0]]])
    allowed = torch.tensor([[[False, True, True, True, True], [True, True, False, False, False]]])
    found = select_keys(scores, allowed, 2)
    assert found.int().tolist() == [[[0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]]
    assert torch.equal(select_keys(scores, allowed, 5), allowed)
    nothing = torch.zeros(1, 2, 5, dtype=torch.bool)
    assert not select_keys(scores, nothing, 2).any()


def test_later_keys_do_not_change_the_selection_among_earlier_ones() -> None:
    draw = torch.Generator().manual_seed(2)
    scores = torch.randint(4, (1, 8, 30), generator=draw).float()
    allowed = torch.ones(8, 30, dtype=torch.bool).tril(5)[None]
    found = select_keys(scores, allowed, 4)
    assert torch.equal(found[:, :3, :9], select_keys(scores[:, :3, :9], allowed[:, :3, :9], 4))
    assert found.sum(-1).unique().tolist() == [4]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_product_of_zero_has_no_gradient_as_of_torchs_relu(backend: str) -> None:
    q = torch.tensor([0.0, 1.0], dtype=F64).view(1, 1, 1, 2).requires_grad_()
    k = torch.tensor([[3.0, 0.0], [4.0, 0.5]], dtype=F64).view(2, 1, 2).requires_grad_()
    found = index_scores(q, k, torch.full((1, 1, 1), 2.0, dtype=F64), backend=backend)
    of_q, of_k = torch.autograd.grad(found.sum(), (q, k))
    assert of_q.flatten().tolist() == [8.0, 1.0]  # of the second key alone
    assert of_k.flatten(1).tolist() == [[0.0, 0.0], [0.0, 2.0]]
