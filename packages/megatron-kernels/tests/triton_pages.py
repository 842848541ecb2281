"""Tests of paged attention and casts to FP8 in Triton's interpreter; `test_triton.py` runs them."""

import pytest
import torch
from equal_to_reference import CPU, F64
from megatron_kernels import Pages, Scores, paged_attention, quantize_tensor
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.triton_kernels import paged_attention as kernels_of_pages


def test_long_sequences_in_blocks_are_added_from_parts() -> None:
    """Has one or two parts; one sequence ends at the end of a part, one has a single key."""
    draw = InputGenerator(F64, CPU)
    lengths = (kernels_of_pages.PART, kernels_of_pages.PART + 70, 1)
    used = -(-max(lengths) // 16)
    q = draw.normal(2, 3, 2, 8).detach()
    k, v = (draw.normal(3 * used, 16, 1, 8, mean=mean).detach() for mean in (0, 1))
    tables = torch.randperm(3 * used).view(3, used).int()
    pages = Pages(tables, torch.tensor(lengths).int())
    every = Scores(softcap=3.0, slopes=torch.rand(2) / 100, sinks=torch.randn(2))
    results = []
    for window, scores in ((None, Scores()), (550, every), (3, every)):
        found, expected = (
            paged_attention(q, k, v, pages, window, scores, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        results.append(found)
    # The same bits alone, in a table of another width.
    alone = Pages(tables[:1, : lengths[0] // 16], torch.tensor(lengths[:1]).int())
    one = paged_attention(q[:, :1], k, v, alone, backend="triton")
    assert torch.equal(one, results[0][:, :1])


def test_parts_are_weighted_by_their_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of one of two parts are higher by about 3."""
    monkeypatch.setattr(kernels_of_pages, "PART", 16)
    for larger in (0, 1):
        check_parts(InputGenerator(F64, CPU), larger)


def check_parts(draw: InputGenerator, larger: int) -> None:
    q, k, v = (draw.normal(*shape).detach() for shape in ((1, 1, 1, 4), *[(2, 16, 1, 4)] * 2))
    k[larger] += 1.5 * q[0] / q[0].square().sum() * 4**0.5 * 2
    pages = Pages(torch.tensor([[0, 1]]).int(), torch.tensor([25]).int())
    found, expected = (
        paged_attention(q, k, v, pages, None, Scores(), backend=name)
        for name in ("triton", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_every_number_of_16_bits_becomes_the_number_that_torch_casts_it_to() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.bfloat16, torch.float16):
        x, one = every.view(dtype).view(256, 256), torch.ones(())
        for elements in ("e4m3", "e5m2"):
            found, expected = (
                quantize_tensor(x, elements, scale=one, backend=name)
                for name in ("triton", "reference")
            )
            nan = expected.rows.float().isnan()
            for one_way, other in zip(found[:2], expected[:2], strict=True):
                same = one_way.view(torch.uint8) == other.view(torch.uint8)
                assert (same | (one_way.float().isnan() & other.float().isnan())).all()
            assert torch.equal(found.rows.float().isnan(), nan) and nan.any() and not nan.all()


def test_a_tensor_of_zeros_has_the_scale_1() -> None:
    for rule in ("float32", "power_of_two"):
        found = quantize_tensor(torch.zeros(3, 5), "e4m3", rule, backend="triton")
        assert found.scale == 1 and not found.rows.float().any() and not found.columns.float().any()


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_scales_of_exact_tiny_and_infinite_magnitudes(dtype: torch.dtype) -> None:
    tiny = torch.finfo(torch.float32).tiny
    for largest, expected in (
        (448 / 4, 0.25),
        (-448 * 2.0**9, 2.0**9),
        (tiny, tiny),  # a smaller scale has no inverse in float32
        (torch.inf, torch.nan),
        (torch.nan, torch.nan),
    ):
        x = torch.zeros(2, 3, dtype=dtype)
        x[1, 2], wanted = largest, torch.tensor(expected, dtype=dtype)
        for rule in ("float32", "power_of_two"):
            scale = quantize_tensor(x, "e4m3", rule, backend="triton").scale
            torch.testing.assert_close(scale, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_transposed_matrix_is_cast_like_another() -> None:
    x = torch.randn(5, 3).t()
    for sides in ((True, True), (True, False), (False, True)):
        found, expected = (
            quantize_tensor(x, "e4m3", "float32", None, *sides, backend=name)
            for name in ("triton", "reference")
        )
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape and torch.equal(one.double(), other.double())


CASTS = [  # dtype, elements, rule, scale, rows, columns, whether the magnitude is wanted
    (torch.float32, "e4m3", "float32", None, True, True, True),
    (torch.float32, "e5m2", "power_of_two", None, True, False, True),
    (torch.float64, "e4m3", "power_of_two", None, False, True, True),
    (torch.float64, "e4m3", "float32", None, True, True, True),
    (torch.bfloat16, "e4m3", "float32", 0.0, True, True, True),
    (torch.float32, "e4m3", "float32", 2e-6, True, True, True),  # clips
    (torch.float32, "e4m3", "power_of_two", 2e-5, True, True, False),
]


def test_casts_with_every_option_have_the_bits_of_the_reference() -> None:
    """Several matrices of several tiles, of which the last has the largest number."""
    numbers = 3e-3 * torch.randn(2, 3, 700, dtype=F64)
    numbers[1, 2, 699] = -0.03
    for dtype, elements, rule, scale, *rest in CASTS:
        given = None if scale is None else torch.tensor(scale)
        whole = dtype is torch.float32 and scale is None
        for x in (numbers if whole else numbers[..., 570:], numbers[:, :0]):
            found, expected = (
                quantize_tensor(x.to(dtype), elements, rule, given, *rest, backend=name)
                for name in ("triton", "reference")
            )
            for one, other in zip(found, expected, strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert torch.equal(one.double(), other.double()), (dtype, elements, rule, scale)
