"""What the Triton backends refuse, asked with tensors of a GPU that have no values.

Neither Triton nor a GPU is needed: the reasons depend on devices, dtypes and shapes.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron_kernels import (
    Mask,
    Op,
    Pages,
    Scores,
    add_layer_norm,
    add_rms_norm,
    add_vocab_gradient,
    attention,
    bias_dropout_add,
    bias_gelu,
    causal_conv,
    fuses_on,
    layer_norm,
    paged_attention,
    rms_norm,
    rope,
    softmax,
    ssd_scan,
)
from megatron_kernels.ops import triton_op
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def _without_values() -> Iterator[None]:
    with FakeTensorMode():
        yield


def of(*shape: int, dtype: torch.dtype = BF16, device: str = "cuda") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def reason(op: Op[..., Any], *arguments: Any) -> str | None:
    """Returns why the Triton backend does not support a call; None if it does."""
    bound = inspect.signature(op.signature).bind(*arguments)
    bound.apply_defaults()
    del bound.arguments["backend"]
    return op.backend("triton").unsupported_reason(*op.given(*bound.arguments.values()))


def test_numbers_of_16_to_64_bits_on_a_gpu_are_supported() -> None:
    for dtype in (BF16, F16, F32, F64):
        assert triton_op.unsupported_reason(of(2, dtype=dtype), None) is None
    for dtype in (torch.float8_e4m3fn, torch.int32):
        found = triton_op.unsupported_reason(None, of(2), of(2, dtype=dtype))
        assert found == f"needs floating-point numbers of 16, 32 or 64 bits, got {dtype}"
    found = triton_op.unsupported_reason(of(2), of(2, device="cpu"))
    assert found == "needs a CUDA tensor, x is on cpu"


def test_operations_of_our_kernels_fuse_on_a_gpu() -> None:
    assert fuses_on(bias_gelu, "cuda", BF16) and not fuses_on(causal_conv, "cuda", BF16)


def test_a_program_holds_rows_of_65536_elements() -> None:
    fits, wide, few = of(2, 2**16), of(2, 2**16 + 1), of(2, 5)
    message = "has rows of at most 65536 elements, got 65537"
    for norm, rest in ((rms_norm, (None,)), (add_rms_norm, (None, None))):
        assert reason(norm, fits, *rest) is None
        assert reason(norm, wide, *rest) == message
    for norm, before in ((layer_norm, ()), (add_layer_norm, (None,))):
        for x in (fits, wide):
            given = x, *before, of(x.shape[1]), of(x.shape[1])
            assert reason(norm, *given) == (None if x is fits else message)
    assert reason(softmax, fits) is None and reason(softmax, wide) == message
    assert reason(softmax, few) is None


def test_a_stream_has_one_dtype_and_parameters_any() -> None:
    x, gain, other = of(2, 8), of(8, dtype=F32), of(2, 8, dtype=F32)
    assert reason(rms_norm, x, gain) is None
    assert reason(add_rms_norm, x, of(2, 8), gain) is None
    message = "x is torch.bfloat16 and what is added torch.float32; they must agree"
    assert reason(add_rms_norm, x, other, gain) == message
    assert reason(add_layer_norm, x, other, gain, gain) == message
    words = torch.empty(2, 3, dtype=torch.int32, device="cuda")
    stream, site = of(2, 3, 8), DropoutSite(0, 0, 0, 2.0)
    assert reason(bias_dropout_add, stream, gain, stream, words, words, site) is None
    found = reason(bias_dropout_add, stream, None, stream.float(), words, words, site)
    assert found == "x is torch.bfloat16 and the residual stream torch.float32; they must agree"


@pytest.mark.parametrize("at", range(3))
def test_every_tensor_must_be_on_a_gpu(at: int) -> None:
    def given(*tensors: Tensor) -> list[Tensor]:
        return [x.to("cpu") if number == at else x for number, x in enumerate(tensors)]

    message = "needs a CUDA tensor, x is on cpu"
    table = of(4, 1, 4, dtype=F32)
    assert reason(layer_norm, *given(of(2, 8), of(8), of(8))) == message
    assert reason(rope, *given(of(4, 2, 3, 8), table, table)) == message
    assert reason(causal_conv, *given(of(5, 2, 3), of(3, 4), of(3))) == message
    q, k = of(5, 2, 4, 16), of(5, 2, 2, 16)
    assert reason(attention, *given(q, k, k), Mask()) == message
    if at < 2:
        assert reason(rms_norm, *given(of(2, 8), of(8))) == message
        assert reason(bias_gelu, *given(of(2, 8), of(8))) == message


def test_gradients_of_rows_are_added_to_a_contiguous_tensor() -> None:
    tokens = torch.empty(3, dtype=torch.int64, device="cuda")
    into, dy = of(8, 6, dtype=F32), of(3, 6)
    assert reason(add_vocab_gradient, into, dy, tokens) is None
    columns = of(6, 8, dtype=F32).t()
    assert reason(add_vocab_gradient, columns, dy, tokens) == "adds to a contiguous tensor only"


def test_heads_of_attention_have_up_to_256_channels_of_one_dtype() -> None:
    def heads(width: int, of_values: int, dtype: torch.dtype = BF16) -> list[Tensor]:
        return [of(5, 2, n, d, dtype=dtype) for n, d in ((4, width), (2, width), (2, of_values))]

    for good in (heads(256, 256), heads(64, 256), heads(256, 8), heads(16, 16, F32)):
        assert reason(attention, *good, Mask()) is None
    for wide in (heads(257, 8), heads(8, 257)):
        found = reason(attention, *wide, Mask())
        assert found == "heads of 257 channels are wider than 256"
    q, k, v = heads(16, 16)
    assert "they must agree" in str(reason(attention, q.float(), k, v, Mask()))
    assert "they must agree" in str(reason(attention, q, k, v.float(), Mask()))
    assert reason(attention, *heads(16, 16, F64), Mask()) == "on CUDA it does not support float64"
    slopes = of(4, dtype=F32)
    assert reason(attention, q, k, v, Mask(), Scores(slopes=slopes)) is None
    found = reason(attention, q, k, v, Mask(), Scores(slopes=slopes.requires_grad_()))
    assert found == "it gives slopes no gradient"


def test_a_program_of_paged_attention_holds_128_queries_of_256_channels() -> None:
    def call(queries: int, width: int, dtype: torch.dtype = BF16, of_values: int = 8) -> str | None:
        tables, lengths = (torch.empty(n, dtype=torch.int32, device="cuda") for n in ((2, 3), 2))
        k, v = (of(7, 16, 2, d, dtype=dtype) for d in (width, of_values))
        q = of(queries, 2, 8, width, dtype=dtype)
        return reason(paged_attention, q, k, v, Pages(tables, lengths))

    assert call(32, 256) is None and call(1, 8, of_values=256) is None  # four heads of a group
    assert call(33, 8) == "supports at most 128 queries of a group's heads, got 132"
    for wide in (call(1, 257), call(1, 8, of_values=257)):
        assert wide == "supports at most 256 channels of a head, got 257"
    assert call(1, 8, F64) == "on CUDA it does not support float64"
    assert call(1, 8, F32) is None


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 256), (F16, 128), (F32, 128)], ids=str)
def test_heads_and_states_of_a_scan_have_a_largest_width(dtype: torch.dtype, most: int) -> None:
    def call(width: int, state: int, tokens: int = 5, heads: int = 4) -> str | None:
        x, dt = of(tokens, 2, heads, width, dtype=dtype), of(tokens, 2, heads, dtype=dtype)
        b, a = of(tokens, 2, 2, state, dtype=dtype), of(heads, dtype=F32)
        return reason(ssd_scan, x, dt, a, b, b)

    assert call(most, 8) is None and call(8, most) is None
    for found in (call(most + 1, 8), call(8, most + 1)):
        assert str(found).endswith(f"are wider than {most}, the most in {dtype}")
    for empty in (call(8, 8, tokens=0), call(8, 0), call(0, 8)):
        assert empty == "there are no tokens, heads or channels"


def test_scans_have_one_dtype_that_a_gpu_computes_fast() -> None:
    x, dt, a, b = of(5, 2, 4, 8), of(5, 2, 4), of(4, dtype=F32), of(5, 2, 2, 8)
    assert "they must agree" in str(reason(ssd_scan, x, dt, a, b.float(), b))
    assert "they must agree" in str(reason(ssd_scan, x, dt, a, b, b.float()))
    wide = (x.double(), dt, a, b.double(), b.double())
    assert reason(ssd_scan, *wide) == "on CUDA it does not support float64"
    assert reason(ssd_scan, x, dt.to("cpu"), a, b, b) == "needs a CUDA tensor, x is on cpu"


def test_filters_have_up_to_16_taps() -> None:
    x = of(5, 2, 3)
    assert reason(causal_conv, x, of(3, 16)) is None
    assert reason(causal_conv, x, of(3, 17)) == "filters of 17 taps are longer than 16"
