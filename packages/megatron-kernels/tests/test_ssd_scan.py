"""The scan of Mamba-2: chunks against the recurrence, documents, states, and sums by hand."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron_kernels import KernelError, ssd_scan

F64 = torch.float64
IDS = torch.tensor([[3] * 5 + [9] * 1 + [2] * 17 + [3] * 14, [0] * 20 + [1] * 9 + [-1] * 8])
"""Documents that end inside chunks, at their ends, and before padding."""


def inputs(length: int = 37, *, state: bool = True, groups: int = 2) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=F64, generator=generator)

    found = [draw(length, 2, 4, 3), draw(length, 2, 4), -draw(4).exp()]
    found += [draw(length, 2, groups, 5), draw(length, 2, groups, 5), draw(4), draw(4)]
    return [*found, None, draw(2, 4, 3, 5) if state else None]


def with_gradients(given: list[torch.Tensor | None], **options: Any) -> list[torch.Tensor]:
    leaves = [
        each.clone().requires_grad_() if each is not None and each.is_floating_point() else each
        for each in given
    ]
    found = ssd_scan(*leaves, **options)  # type: ignore[arg-type]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    weights = [torch.linspace(-1, 2, out.numel(), dtype=F64).view(out.shape) for out in found]
    return [*found, *torch.autograd.grad(found, wanted, weights)]


@pytest.mark.parametrize("chunk_size", [1, 5, 8, 37, 128])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("state", [False, True], ids=["from zero", "from a state"])
def test_chunks_equal_the_recurrence_forward_and_backward(
    chunk_size: int, documents: bool, state: bool
) -> None:
    given = inputs(state=state)
    given[7] = IDS if documents else None
    found = with_gradients(given, chunk_size=chunk_size, backend="chunked")
    expected = with_gradients(given, backend="reference")
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_two_steps_by_hand(backend: str) -> None:
    # softplus(log(e - 1)) = 1, so both steps are 1 and the decay is exp(-ln 2) = 1/2.
    one = math.log(math.e - 1)
    x = torch.tensor([3.0, 5.0], dtype=F64).view(2, 1, 1, 1)
    dt = torch.full((2, 1, 1), one - 0.25, dtype=F64)
    a, bias = torch.tensor([-math.log(2)], dtype=F64), torch.tensor([0.25], dtype=F64)
    b = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=F64).view(2, 1, 1, 2)
    c = torch.tensor([[1.0, 1.0], [10.0, 100.0]], dtype=F64).view(2, 1, 1, 2)
    d = torch.tensor([1000.0], dtype=F64)
    found = ssd_scan(x, dt, a, b, c, d, bias, backend=backend)
    expected = torch.tensor([6.0 + 3000, 3.0 * 10 + 5.0 * 100 + 5000], dtype=F64)
    torch.testing.assert_close(found.output.flatten(), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.state.flatten(), torch.tensor([3.0, 5.0], dtype=F64))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_each_document_is_scanned_as_if_alone(backend: str) -> None:
    given = inputs(state=False)
    given[7] = IDS
    found = ssd_scan(*given, chunk_size=8, backend=backend)  # type: ignore[arg-type]
    for row, bounds in enumerate([(0, 5, 6, 23, 37), (0, 20, 29)]):
        for start, stop in pairwise(bounds):
            alone = [
                each[start:stop, row : row + 1] if i in (0, 1, 3, 4) and each is not None else each
                for i, each in enumerate(given)
            ]
            alone[7] = None
            part = ssd_scan(*alone, backend="reference")  # type: ignore[arg-type]
            ours = found.output[start:stop, row]
            torch.testing.assert_close(ours, part.output[:, 0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.state[row], part.state[0], rtol=1e-12, atol=1e-12)
    assert not found.output[29:, 1].any()


def test_parts_with_the_state_between_them_equal_the_whole() -> None:
    given = inputs()
    whole = ssd_scan(*given, chunk_size=8)  # type: ignore[arg-type]
    state, outputs = given[8], []
    for start, stop in ((0, 1), (1, 12), (12, 37)):
        part = [
            each[start:stop] if i in (0, 1, 3, 4) and each is not None else each
            for i, each in enumerate(given[:8])
        ]
        output, state = ssd_scan(*part, state, chunk_size=8)  # type: ignore[arg-type]
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), whole.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, whole.state, rtol=1e-12, atol=1e-12)


def test_heads_of_a_group_share_what_is_added_and_read() -> None:
    given = inputs()
    shared = ssd_scan(*given)  # type: ignore[arg-type]
    for index in (3, 4):
        each = given[index]
        assert each is not None
        given[index] = torch.stack([each[:, :, head // 2] for head in range(4)], 2)
    own = ssd_scan(*given)  # type: ignore[arg-type]
    torch.testing.assert_close(shared.output, own.output, rtol=1e-12, atol=1e-12)


def test_steps_are_limited_after_the_softplus() -> None:
    given = inputs()
    found = ssd_scan(*given, dt_limits=(0.4, 0.6))  # type: ignore[arg-type]
    dt, bias = given[1], given[6]
    assert dt is not None and bias is not None
    given[1] = torch.nn.functional.softplus(dt + bias).clamp(0.4, 0.6).expm1().log()
    given[6] = None
    expected = ssd_scan(*given, backend="reference")  # type: ignore[arg-type]
    torch.testing.assert_close(found.output, expected.output, rtol=1e-12, atol=1e-12)


def test_bfloat16_inputs_have_a_float32_state() -> None:
    given = [None if each is None else each.bfloat16() for each in inputs(state=False)]
    found = ssd_scan(*given)  # type: ignore[arg-type]
    assert found.output.dtype == torch.bfloat16 and found.state.dtype == torch.float32


def test_groups_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(KernelError, match="3 groups do not divide 4 heads"):
        ssd_scan(*inputs(groups=3))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="chunk_size is 0; use at least 1"):
        ssd_scan(*inputs(), chunk_size=0)  # type: ignore[arg-type]
