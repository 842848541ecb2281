"""The causal convolution by hand, over documents, and continued from its state."""

import pytest
import torch
from megatron_kernels import causal_conv, number_documents
from megatron_kernels.ops.ssm.documents import encode_documents

F64 = torch.float64


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("backend", ["conv1d", "reference"])
def test_each_output_is_the_sum_of_the_taps_by_hand(backend: str) -> None:
    x = torch.tensor([1.0, 2.0, 4.0], dtype=F64).view(3, 1, 1)
    weight, bias = torch.tensor([[10.0, 1.0]], dtype=F64), torch.tensor([0.5], dtype=F64)
    found = causal_conv(x, weight, bias, backend=backend)
    assert found.output.flatten().tolist() == [1.5, 12.5, 24.5]
    assert found.state.tolist() == [[[4.0]]]


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_documents_are_convolved_as_if_alone_and_padding_is_zero(taps: int) -> None:
    x, weight, bias = draw(9, 1, 3), draw(3, taps), draw(3)
    ids = torch.tensor([[3, 3, 1, 1, 1, 1, 1, -1, -1]])
    found = causal_conv(x, weight, bias, ids)
    parts = [causal_conv(x[a:b], weight, bias) for a, b in ((0, 2), (2, 7))]
    torch.testing.assert_close(found.output[:7], torch.cat([part.output for part in parts]))
    assert not found.output[7:].any()
    torch.testing.assert_close(found.state, parts[1].state, rtol=0, atol=0)


def test_the_state_of_a_short_document_has_zeros_before_it() -> None:
    x = draw(5, 1, 2)
    found = causal_conv(x, draw(2, 4), None, torch.tensor([[0, 0, 0, 1, -1]])).state
    assert not found[0, :2].any() and torch.equal(found[0, 2], x[3, 0])


@pytest.mark.parametrize("cuts", [(1, 2), (4, 5), (2, 9)])
def test_parts_with_the_state_between_them_equal_the_whole(cuts: tuple[int, int]) -> None:
    x, weight, bias = draw(10, 2, 3), draw(3, 4), draw(3)
    whole = causal_conv(x, weight, bias)
    state, outputs = None, []
    for a, b in zip((0, *cuts), (*cuts, 10), strict=True):
        output, state = causal_conv(x[a:b], weight, bias, None, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), whole.output, rtol=0, atol=1e-14)
    assert torch.equal(state, whole.state)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_padding_does_not_enter_the_state_of_a_later_part(taps: int) -> None:
    x, weight = draw(6, 1, 3), draw(3, taps)
    state = causal_conv(x[:4], weight).state
    ids = torch.tensor([[0, -1]])
    assert torch.equal(
        causal_conv(x[4:], weight, None, ids, state).state,
        causal_conv(x[:5], weight).state,
    )
    none = causal_conv(x[4:], weight, None, torch.tensor([[-1, -1]]), state)
    assert torch.equal(none.state, state) and not none.output.any()


def test_documents_are_counted_without_padding() -> None:
    ids = torch.tensor([[5, 5, -1, 5, 2, -1], [-1, -1, 0, 0, 1, 0]])
    numbers, real = number_documents(ids)
    assert numbers.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 2]]
    assert torch.equal(real, ids >= 0)
    # For kernels twice the number, and one more for padding.
    assert encode_documents(ids).tolist() == [[0, 0, 1, 0, 2, 3], [1, 1, 0, 0, 2, 4]]
    assert encode_documents(None) is None


def test_what_torchs_convolution_does_not_compute_has_a_reason() -> None:
    x, weight, bias = (draw(*shape).bfloat16() for shape in ((5, 1, 3), (3, 4), (3,)))
    assert causal_conv.explain(x, weight, bias).backend == "conv1d"
    assert causal_conv.explain(x, weight).backend == "conv1d"
    for given, reason in (
        ((x, weight.float()), "weight torch.float32; they must agree"),
        ((x, weight, bias.float()), "they must agree"),
        ((x[:0], weight), "there are no tokens"),
        ((x, weight, bias, torch.zeros(1, 5, dtype=torch.int64)), "across document ends"),
    ):
        choice = causal_conv.explain(*given)
        assert choice.backend == "reference" and reason in choice.reason
        found = causal_conv(*given)
        assert found.output.dtype == torch.bfloat16 and found.output.shape == given[0].shape
