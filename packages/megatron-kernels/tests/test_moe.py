"""Operations of a mixture of experts against products computed one by one."""

import pytest
import torch
from megatron_kernels import KernelError, grouped_matmul, permute, sort_by_expert, unpermute

EXPERTS = torch.tensor([[2, 0], [-1, -1], [0, 3], [3, 2], [0, 2]])


def test_choices_are_sorted_by_expert_and_keep_the_order_of_tokens() -> None:
    order, counts = sort_by_expert(EXPERTS, 4)
    assert counts.tolist() == [3, 0, 3, 2]
    assert (order // 2).tolist() == [0, 2, 4, 0, 3, 4, 2, 3]  # tokens
    assert EXPERTS.flatten()[order].tolist() == [0, 0, 0, 2, 2, 2, 3, 3]


def test_no_tokens_give_no_rows() -> None:
    order, counts = sort_by_expert(torch.full((3, 2), -1), 4)
    assert len(order) == 0 and counts.tolist() == [0, 0, 0, 0]
    assert permute(torch.ones(3, 5), order, 2).shape == (0, 5)
    assert not unpermute(torch.ones(0, 5), order, torch.ones(3, 2)).any()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_layer_of_experts_equals_a_loop_over_tokens(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, 6), (4, 6, 3), (5, 2))
    tokens, weight, share = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    order, counts = sort_by_expert(EXPERTS, 4)
    rows = grouped_matmul(permute(tokens, order, 2), weight, counts, backend=backend)
    found = unpermute(rows, order, share)
    expected = torch.stack(
        [
            sum(
                (w * (x @ weight[e]) for e, w in zip(chosen, shares, strict=True) if e >= 0),
                start=torch.zeros(3, dtype=torch.float64),
            )
            for x, chosen, shares in zip(tokens, EXPERTS.tolist(), share, strict=True)
        ]
    )
    torch.testing.assert_close(found, expected)
    gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    leaves = (tokens, weight, share)
    ours = torch.autograd.grad(found, leaves, gradient)
    theirs = torch.autograd.grad(expected, leaves, gradient)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert not ours[1][1].any() and not ours[0][1].any() and not ours[2][1].any()


def test_counts_that_do_not_fit_are_refused_with_their_numbers() -> None:
    x, weight = torch.ones(4, 2), torch.ones(3, 2, 2)
    with pytest.raises(KernelError, match="2 counts for 3 matrices"):
        grouped_matmul(x, weight, torch.tensor([2, 2]))
    with pytest.raises(KernelError, match="add up to 5 rows, x has 4"):
        grouped_matmul(x, weight, torch.tensor([2, 2, 1]))


def test_the_fused_grouped_kernel_reports_why_it_does_not_run() -> None:
    choice = grouped_matmul.explain(torch.ones(1, 8), torch.ones(1, 8, 8), torch.tensor([1]))
    assert choice.backend == "torch" and "grouped_mm: needs a CUDA tensor" in choice.reason
