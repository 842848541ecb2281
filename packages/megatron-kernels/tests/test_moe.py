"""Operations of a mixture of experts against products computed one by one."""

import pytest
import torch
from megatron_kernels import KernelError, grouped_matmul, permute, sort_by_expert, unpermute

EXPERTS = torch.tensor([[2, 0], [-1, -1], [0, 3], [3, 2], [0, 2]])


def test_choices_are_sorted_by_expert_and_keep_the_order_of_tokens() -> None:
    order, counts = sort_by_expert(EXPERTS, 4)
    assert counts.tolist() == [3, 0, 3, 2]
    assert (order // 2).tolist() == [0, 2, 4, 0, 3, 4, 2, 3, 1, 1]  # tokens; no expert comes last
    assert EXPERTS.flatten()[order].tolist() == [0, 0, 0, 2, 2, 2, 3, 3, -1, -1]


def test_numbers_outside_the_experts_come_last() -> None:
    order, counts = sort_by_expert(torch.tensor([[5], [1], [-7], [0], [2], [1]]), 2)
    assert order.tolist() == [3, 1, 5, 0, 2, 4] and counts.tolist() == [1, 2]
    order, counts = sort_by_expert(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert order.shape == (0,) and counts.tolist() == [0, 0, 0]


def test_choices_of_no_expert_give_no_rows_to_experts() -> None:
    order, counts = sort_by_expert(torch.full((3, 2), -1), 4)
    assert sorted(order.tolist()) == list(range(6)) and counts.tolist() == [0, 0, 0, 0]
    assert permute(torch.ones(3, 5), order[:0], 2).shape == (0, 5)
    assert not unpermute(torch.ones(0, 5), order[:0], torch.ones(3, 2)).any()
    products = grouped_matmul(torch.ones(6, 8), torch.ones(4, 8, 8), counts)
    assert not unpermute(products, order, torch.ones(3, 2)).any()


@pytest.mark.parametrize("rows", [10, 9, 8])  # with 8, those of routed choices only
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_layer_of_experts_equals_a_loop_over_tokens(backend: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, 6), (4, 6, 3), (5, 2))
    tokens, weight, share = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    order, counts = sort_by_expert(EXPERTS, 4)
    order = order[:rows]
    chosen = permute(tokens, order, 2)
    found = grouped_matmul(chosen, weight, counts, has_tail=rows > 8, backend=backend)
    found = unpermute(found, order, share)
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
    with pytest.raises(KernelError, match=r"add up to 5 rows, x has 4$"):
        grouped_matmul(x, weight, torch.tensor([2, 2, 1]))
    with pytest.raises(KernelError, match=r"add up to 3 rows, x has 4 and no tail$"):
        grouped_matmul(x, weight, torch.tensor([2, 0, 1]), has_tail=False)


def test_the_fused_grouped_kernel_reports_why_it_does_not_run() -> None:
    x, weight, counts = torch.ones(1, 8), torch.ones(1, 8, 8), torch.tensor([1])
    assert grouped_matmul.explain(x, weight, counts).backend == "grouped_mm"
    choice = grouped_matmul.explain(x.double(), weight.double(), counts)
    assert choice.backend == "torch"
    assert "grouped_mm: needs float32, bfloat16 or float16 on a CPU, x is" in choice.reason
    choice = grouped_matmul.explain(x[:, :3], weight[:, :3], counts)
    assert "rows of 3 numbers are not a multiple of 16 bytes" in choice.reason
    assert "there are no rows" in grouped_matmul.explain(x[:0], weight, counts).reason


def drawn(counts: tuple[int, ...], tail: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts) + tail, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), 24, 16, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.tensor(counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(4, 0, 5), (0, 0, 0), (0, 9, 0)])
def test_fused_and_looped_products_have_equal_bits_and_an_empty_tail(
    counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight, sizes = drawn(counts, 6, dtype)
    rows = sum(counts)
    found = []
    for backend in ("grouped_mm", "torch"):
        for _ in range(3):  # memory without values differs from call to call
            torch.full((15, 24), torch.nan)
            y = grouped_matmul(x, weight.transpose(1, 2), sizes, backend=backend)
            gradient = torch.arange(y.numel(), dtype=dtype).view(y.shape).sin()
            grads = torch.autograd.grad(y, (x, weight), gradient)
            assert not y[rows:].any() and not grads[0][rows:].any()
            found.append((y.detach(), *grads))
    for one, other in zip(found[0], found[-1], strict=True):
        assert torch.equal(one, other)
    alone = [r @ m for r, m in zip(x[:rows].split(counts), weight.transpose(1, 2), strict=True)]
    assert torch.equal(found[0][0][:rows], torch.cat(alone).detach())


def test_the_fused_product_takes_the_gradient_of_a_sum() -> None:
    x, weight, counts = drawn((4, 4), 0, torch.float32)
    y = grouped_matmul(x, weight.transpose(1, 2), counts, has_tail=False, backend="grouped_mm")
    y.sum().backward()
    expected = torch.cat([torch.ones(4, 24) @ w for w in weight.detach()])
    torch.testing.assert_close(x.grad, expected)
