"""Rotary embedding: frequencies against recorded numbers, rotation against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import (
    KernelError,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    rope,
    rope_frequencies,
    rope_tables,
)
from megatron_kernels.ops.rope.rope import reference, swapped

F64 = torch.float64
both = pytest.mark.parametrize("backend", ["torch", "reference"])


def test_llama_3_1_frequencies_equal_those_of_megatron_core() -> None:
    # Computed by megatron-core: head dimension 128, base 500 000, factor 8, 1, 4, 8192.
    theirs = {
        0: 1.0,
        16: 0.0376060307,
        28: 0.0032114461,
        32: 0.000524846,
        40: 3.4281024e-05,
        63: 3.0689259e-07,
    }
    ours = rope_frequencies(128, 500_000.0, scaling=Llama3Scaling(8.0))
    for index, frequency in theirs.items():
        assert float(ours[index]) == pytest.approx(frequency, rel=5e-7)


def test_yarn_range_and_concentration_equal_those_of_megatron_core() -> None:
    # Computed by megatron-core: beta 32 and 1, 64 channels, base 10 000, original context 4096.
    yarn = YarnScaling(40.0, original_max_position_embeddings=4096)
    assert yarn.correction_range(64, 10_000.0) == (10, 23)
    assert yarn.attention_factor == pytest.approx(1.3688879, rel=1e-7)
    assert YarnScaling(40.0, mscale_all_dim=1.0).attention_factor == 1.0


def test_yarn_keeps_high_frequencies_divides_low_ones_and_blends_between() -> None:
    plain = rope_frequencies(64)
    scaled = rope_frequencies(64, scaling=YarnScaling(40.0))
    slowed = (1 - scaled / plain) / (1 - 1 / 40)
    expected = ((torch.arange(32, dtype=F64) - 10) / 13).clamp(0, 1)
    torch.testing.assert_close(slowed, expected, rtol=0, atol=1e-12)


def test_yarn_tables_include_the_attention_factor() -> None:
    yarn = YarnScaling(40.0)
    frequencies = rope_frequencies(16, scaling=yarn)
    cos, sin = rope_tables(torch.arange(3), frequencies, F64, yarn)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, 1.3688879454))


def test_linear_scaling_equals_positions_divided() -> None:
    scaled = rope_frequencies(8, scaling=LinearScaling(4.0))
    plain = rope_tables(torch.arange(5), rope_frequencies(8), F64)
    for ours, theirs in zip(rope_tables(torch.arange(5) * 4, scaled, F64), plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_plain_frequencies_by_hand() -> None:
    torch.testing.assert_close(
        rope_frequencies(8, 10_000.0), torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=F64)
    )
    assert rope_frequencies(8, percent=0.5).tolist() == pytest.approx([1.0, 0.01])


@pytest.mark.parametrize(("dim", "percent"), [(8, 0.0), (6, 0.5), (8, 1.5)])
def test_channels_that_cannot_be_paired_are_an_error(dim: int, percent: float) -> None:
    with pytest.raises(KernelError, match="positive even number"):
        rope_frequencies(dim, percent=percent)


@both
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_is_rotated_by_its_angle_and_other_channels_are_unchanged(
    interleaved: bool, backend: str
) -> None:
    x = torch.randn(3, 2, 2, 6, dtype=F64)
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    cos, sin = rope_tables(positions, rope_frequencies(6, 100.0, 4 / 6), F64)
    found = rope(x, cos, sin, interleaved, backend=backend)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for token in range(3):
        for sample in range(2):
            for index, (first, second) in enumerate(pairs):
                angle = int(positions[sample, token]) * 100.0 ** (-2 * index / 4)
                c, s = math.cos(angle), math.sin(angle)
                a, b = x[token, sample, :, first], x[token, sample, :, second]
                got = found[token, sample]
                torch.testing.assert_close(got[:, first], a * c - b * s)
                torch.testing.assert_close(got[:, second], a * s + b * c)
    assert torch.equal(found[..., 4:], x[..., 4:])


@settings(deadline=None, max_examples=25)
@given(
    shift=st.integers(0, 5000),
    query=st.integers(0, 500),
    key=st.integers(0, 500),
    interleaved=st.booleans(),
)
def test_scores_depend_on_distance_alone(
    shift: int, query: int, key: int, interleaved: bool
) -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=F64)
    frequencies = rope_frequencies(8)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [
            rope(x, *rope_tables(torch.tensor([at]), frequencies, F64), interleaved)
            for x, at in ((q, at_q), (k, at_k))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(
        score(query, key), score(query + shift, key + shift), rtol=0, atol=1e-9
    )


@both
def test_low_precision_is_rotated_in_float32(backend: str) -> None:
    x = torch.randn(50, 1, 2, 32).bfloat16()
    cos, sin = rope_tables(torch.arange(50) * 100, rope_frequencies(32))
    found = rope(x, cos, sin, backend=backend)
    truth = rope(x.double(), cos.double(), sin.double(), backend="reference")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, truth.bfloat16())


def test_tables_of_far_positions_are_exact_to_float32() -> None:
    cos, sin = rope_tables(torch.tensor([1_000_000]), rope_frequencies(64))
    for index in (0, 7, 31):
        angle = 1_000_000 * 10_000.0 ** (-2 * index / 64)
        assert float(cos[0, 0, index]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(sin[0, 0, index]) == pytest.approx(math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [4, 6])
def test_the_expression_for_compiled_code_on_gpus_is_the_rotation(
    half: int, interleaved: bool
) -> None:
    x = torch.randn(5, 2, 3, 12, dtype=F64, requires_grad=True)
    cos, sin = rope_tables(torch.arange(5), rope_frequencies(2 * half), F64)
    found, expected = (form(x, cos, sin, interleaved) for form in (swapped, reference))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    dy = torch.randn_like(x)
    of_found, of_expected = (torch.autograd.grad(y, x, dy)[0] for y in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=0, atol=1e-14)
    half_precision = swapped(x.detach().bfloat16(), cos.float(), sin.float(), interleaved)
    rounded = reference(x.detach().bfloat16(), cos.float(), sin.float(), interleaved)
    torch.testing.assert_close(half_precision, rounded, rtol=2**-7, atol=1e-6)
