"""Which kernels of torch compute attention where, asked with tensors that have no values."""

import math
from typing import Any

import pytest
import torch
from megatron_kernels import Mask, Scores, attention_backward, attention_forward
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.flex import flex_unsupported_reason
from megatron_kernels.ops.attention.fused_blocks import (
    fused_backward,
    fused_forward,
    fused_unsupported_reason,
)
from megatron_kernels.ops.attention.sdpa import sdpa
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operations of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name:
            self.found.append(name.removeprefix("_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


def heads(
    width: int, dtype: torch.dtype, device: str = "cuda", groups: int = 2, keys: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    def of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return of(7, 2, 4, width), of(keys, 2, groups, width), of(keys, 2, groups, width - 2)


@pytest.mark.parametrize(
    ("dtype", "width", "rules", "kernel"),
    [
        (BF16, 64, "causal", "flash"),
        (F16, 256, "full", "flash"),
        (BF16, 264, "causal", "efficient"),
        (F16, 60, "causal", "efficient"),
        (F32, 64, "causal", "efficient"),
    ],
    ids=str,
)
def test_flash_kernels_of_cuda_compute_blocks_in_16_bits_without_a_mask(
    dtype: torch.dtype, width: int, rules: str, kernel: str
) -> None:
    with FakeTensorMode(), Names() as names:
        q, k, v = heads(width, dtype)
        mask = Mask(causal=rules == "causal")
        out, lse = attention_forward(q, k, v, mask, backend="torch")
        expected, found = [f"{kernel}_attention"], ()
        if kernel == "flash":  # the other backward pass copies, which needs a torch with CUDA
            given = torch.empty_like(out), q, k, v, out, lse, mask
            expected.append("flash_attention_backward")
            found = attention_backward(*given, backend="torch")
    assert names.found == expected
    assert (out.shape, lse.shape) == ((7, 2, 4, width - 2), (7, 2, 4))
    assert (out.dtype, lse.dtype) == (dtype, F32)
    for gradient, x in zip(found, (q, k, v), strict=False):
        assert (gradient.shape, gradient.dtype) == (x.shape, dtype)


def test_blocks_that_no_fused_kernel_computes_are_refused() -> None:
    def reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return fused_unsupported_reason(AttentionCall(q, k, v, Mask()))

    with FakeTensorMode():
        assert reason(*heads(16, F32)) is None
        assert reason(*heads(16, F64)) == "CUDA kernels do not support float64"
        assert reason(*heads(16, F64, "cpu")) is None
        assert reason(*heads(16, F32, "meta")) == "needs a CPU or CUDA tensor, q is on meta"
        q, k, v = heads(16, F32, "cpu")
        for empty in ((q[:0], k, v), (q, k[:0], v[:0])):
            assert reason(*empty) == "it does not support empty tensors"
        assert reason(q, k, torch.cat((v, v), -1)) == (
            "value heads of 28 channels are wider than query heads"
        )
        assert reason(q, k, k) is None


def test_flexattention_computes_numbers_of_32_and_16_bits() -> None:
    def reason(q: Tensor, k: Tensor, v: Tensor, scores: Scores = Scores()) -> str | None:  # noqa: B008
        return flex_unsupported_reason(AttentionCall(q, k, v, Mask(), scores))

    with FakeTensorMode():
        for dtype in (F32, F16, BF16):
            assert reason(*heads(16, dtype)) is None and reason(*heads(16, dtype, "cpu")) is None
        message = "needs float32, float16 or bfloat16, q is torch.float64"
        assert reason(*heads(16, F64)) == message
        assert reason(*heads(16, F32, "meta")) == "needs a CPU or CUDA tensor, q is on meta"
        q, k, v = heads(16, F32, "cpu")
        for empty in ((q[:0], k, v), (q, k[:0], v[:0])):
            assert reason(*empty) == "it does not support empty tensors"
        # On a CPU no input may need a gradient, on a GPU any may.
        for given in (Scores(bias=torch.empty(1, 4, 7, 7)), Scores(slopes=torch.empty(4))):
            assert reason(q, k, v, given) is None
            for each in (given.bias, given.slopes):
                if each is not None:
                    each.requires_grad_()
            assert reason(q, k, v, given) == "on a CPU it has no backward pass"
            with torch.no_grad():
                assert reason(q, k, v, given) is None
        on_gpu = [x.requires_grad_() for x in heads(16, F32)]
        assert reason(*on_gpu, Scores(sinks=torch.empty(4, device="cuda"))) is None


class OnCuda(Tensor):
    """A tensor on a CPU that claims to be on CUDA."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def exact(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor).double()


def scores_of(
    q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, float]:
    """Checks what the memory-efficient kernel gets; returns its scores and their factor."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = exact(q) @ exact(k).mT * factor
    if bias is not None:
        assert bias.shape == scores.shape and bias.stride(-1) == 1 and bias.stride(-2) % 8 == 0
        scores = scores + exact(bias)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores, factor


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, **options: Any
) -> tuple[Tensor, ...]:
    scores, _ = scores_of(q, k, bias, **options)
    lse = scores.logsumexp(-1) if with_lse else scores.new_empty(0)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.nan)
    out = scores.softmax(-1).nan_to_num() @ exact(v)
    return out.as_subclass(OnCuda), padded.as_subclass(OnCuda), lse, lse


def efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    is_causal: bool,
    *,
    scale: float | None,
) -> tuple[Tensor | None, ...]:
    assert dropout == 0 and wanted == [True, True, True, False]
    assert out.transpose(1, 2).is_contiguous()  # as the kernel reads it in 16 bits
    rows = q.shape[2]
    assert lse.shape[-1] % 32 == 0 and torch.isposinf(lse[..., rows:]).all()
    scores, factor = scores_of(q, k, bias, is_causal, scale)
    p = (scores - exact(lse)[..., :rows, None]).exp()
    dp = exact(dout) @ exact(v).mT
    ds = factor * p * (dp - (exact(dout) * exact(out)).sum(-1, keepdim=True))
    found = ds @ exact(k), ds.mT @ exact(q), p.mT @ exact(dout)
    return *(x.as_subclass(OnCuda) for x in found), None


ALLOWED = torch.rand(2, 7, 9, generator=torch.Generator().manual_seed(2)) > 0.3
ALLOWED[1, 2] = False  # a row without keys


@pytest.mark.parametrize(
    ("mask", "keys"),
    [(Mask(), 7), (Mask(causal=False), 9), (Mask(dense=ALLOWED), 9)],
    ids=["causal", "full", "dense"],
)
def test_the_memory_efficient_kernel_gets_what_it_takes(
    mask: Mask, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With groups of heads, and values of fewer channels; the truth is the reference."""
    names = "_scaled_dot_product_efficient_attention", efficient, efficient_backward
    monkeypatch.setattr(torch.ops.aten, names[0], names[1])
    monkeypatch.setattr(torch.ops.aten, f"{names[0]}_backward", names[2])
    draw = torch.Generator().manual_seed(5)
    shapes = (7, 2, 4, 8), (keys, 2, 2, 8), (keys, 2, 2, 6), (7, 2, 4, 6)
    q, k, v, dout = (torch.randn(shape, generator=draw, dtype=F64) for shape in shapes)
    scores = Scores(scale=0.4)
    truth = attention_forward(q, k, v, mask, scores, backend="reference")
    call = AttentionCall(*(x.as_subclass(OnCuda) for x in (q, k, v)), mask, scores)
    out, lse = fused_forward(call)
    close(out, truth[0])
    close(lse, truth[1])
    final = torch.logaddexp(truth[1], torch.zeros((), dtype=F64))  # of keys in other blocks
    given = dout, q, k, v, truth[0], final, mask, scores
    expected = attention_backward(*given, backend="reference")
    found = fused_backward(call, *(x.as_subclass(OnCuda) for x in (dout, truth[0], final)))
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
def test_rows_without_keys_attend_to_all_on_cuda_and_are_zero(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every kernel of CUDA returns zeros for a row that may attend to nothing."""
    seen = []
    true = torch.nn.functional.scaled_dot_product_attention

    def called(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        seen.append(attn_mask.as_subclass(Tensor))
        given = (x.as_subclass(Tensor) for x in (q, k, v, attn_mask))
        return true(*given, **options).as_subclass(OnCuda)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    draw = torch.Generator().manual_seed(5)
    shapes = (7, 2, 4, 8), (9, 2, 2, 8), (9, 2, 2, 6)
    q, k, v = (torch.randn(shape, generator=draw, dtype=F64).to(dtype) for shape in shapes)
    mask = Mask(dense=ALLOWED)
    found = sdpa(AttentionCall(*(x.as_subclass(OnCuda) for x in (q, k, v)), mask))
    (given,) = seen
    assert given[1, 0, 2].all() and torch.equal(given[:, 0] & ALLOWED, ALLOWED)
    assert int(given.sum()) == int(ALLOWED.sum()) + 9
    assert not exact(found)[2, 1].any()
    truth = attention_forward(q, k, v, mask, backend="reference")[0]
    torch.testing.assert_close(exact(found), truth.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("width", [8, 6])
def test_the_fused_kernel_of_cpus_gets_values_as_wide_as_queries(width: int) -> None:
    q, k = torch.randn(7, 2, 4, 8), torch.randn(7, 2, 2, 8)
    v = torch.randn(7, 2, 2, width)
    with Names() as names:
        found = sdpa(AttentionCall(q, k, v, Mask()))
    assert names.found == ["flash_attention_for_cpu"] and found.shape == (7, 2, 4, width)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(exact(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_the_backward_pass_of_the_flash_kernel_gets_lengths_and_no_dropout(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_scaled_dot_product_flash_attention_backward"
    schema = getattr(torch.ops.aten, name).default._schema.arguments
    seen: dict[str, Any] = {}

    def noted(*given: Any, **options: Any) -> tuple[Tensor, ...]:
        seen.update(zip((each.name for each in schema), given, strict=False), **options)
        return tuple(torch.empty_like(seen[each]) for each in ("query", "key", "value"))

    monkeypatch.setattr(torch.ops.aten, name, noted)
    keys = 7 if causal else 5
    with FakeTensorMode():
        q, k, v = heads(64, BF16, groups=4, keys=keys)
        lse = torch.empty(7, 2, 4, device="cuda")
        mask = Mask(causal=causal)
        dout = torch.empty(7, 2, 4, 62, dtype=BF16, device="cuda")
        attention_backward(dout, q, k, v, dout, lse, mask, Scores(0.3), backend="torch")
    assert (seen["max_q"], seen["max_k"]) == (7, keys)
    assert (seen["dropout_p"], seen["is_causal"], seen["scale"]) == (0.0, causal, 0.3)
    assert seen["cum_seq_q"] is None and seen["cum_seq_k"] is None
    assert seen["logsumexp"].shape == (2, 4, 7) and seen["logsumexp"].is_contiguous()
