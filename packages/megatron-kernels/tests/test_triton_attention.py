"""The Triton kernels of attention: interpreted on a CPU, and as they are on a GPU."""

from pathlib import Path

import pytest
import torch
from interpreted import needs_triton, run_interpreted
from megatron_kernels import Mask, Scores, attention, attention_backward, attention_forward
from megatron_kernels.inputs import CaseDropout
from megatron_kernels.ops.attention.scores import PLAIN_SCORES
from torch import Tensor

HERE = Path(__file__).parent
ON_GPU = pytest.mark.gpu(real="Triton kernels")
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
BATCH = 2


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_in_tritons_interpreter_equal_the_reference(sample: bool) -> None:
    run_interpreted(HERE / "triton_attention.py", sample=sample)


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_in_tritons_interpreter_read_and_keep_what_they_may(sample: bool) -> None:
    run_interpreted(HERE / "triton_attention_tiles.py", sample=sample)


def drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return numbers.to(device, dtype).requires_grad_()


def dropout_of(device: torch.device, queries: int, keys: int, columns: bool) -> CaseDropout:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31, (2, queries, BATCH), generator=generator).int()
    places = torch.randint(keys, (BATCH, keys), generator=generator).to(device) if columns else None
    return CaseDropout(*words.to(device), columns=places, length=keys)


def documents_of(device: torch.device, tokens: int) -> Tensor:
    first = torch.arange(tokens) // 300
    second = torch.where(torch.arange(tokens) < tokens - 100, torch.arange(tokens) // 77, -1)
    return torch.stack((first, second)).int().to(device)


CALLS = {  # rules, dropout, queries, keys, heads, groups, channels, of values
    "causal": ({}, False, 1000, 1000, 8, 8, 64, 64),
    "causal, dropout": ({}, True, 1024, 1024, 8, 8, 128, 128),
    "grouped, dropout": ({}, True, 777, 777, 8, 2, 64, 64),
    "full": ({"causal": False}, True, 500, 900, 4, 1, 80, 80),
    "window": ({"window": 200}, True, 1000, 1000, 4, 4, 128, 128),
    "window both ways": ({"causal": False, "window": 130}, False, 900, 900, 4, 2, 96, 96),
    "chunks": ({"chunk": 300}, True, 1000, 1000, 4, 4, 64, 64),
    "prefix": ({"prefix": 300}, False, 1000, 1000, 4, 4, 64, 64),
    "documents": ({"documents": True}, True, 1000, 1000, 4, 2, 128, 128),
    "wide heads": ({}, True, 300, 300, 2, 2, 256, 256),
    "narrow values": ({}, False, 300, 300, 2, 2, 192, 128),
    "cache": ({}, False, 100, 800, 4, 2, 64, 64),
}
SCORES = {"causal": Scores(0.3, softcap=2.0)}
IN_OTHER_DTYPES = (  # kernels of each dtype take seconds to compile
    ("causal, dropout", torch.float16),
    ("causal", torch.float32),
    ("grouped, dropout", torch.float32),
    ("window", torch.float32),
    ("documents", torch.float32),
)


@ON_GPU
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in CALLS), *IN_OTHER_DTYPES], ids=str
)
def test_values_and_gradients_on_a_gpu_equal_float64(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    rules, drops, queries, keys, heads, groups, width, of_values = CALLS[name]
    rules = dict(rules)
    if rules.pop("documents", False):
        rules["document_ids"] = documents_of(device, keys)
    given = [
        drawn(device, dtype, queries, BATCH, heads, width),
        drawn(device, dtype, keys, BATCH, groups, width),
        drawn(device, dtype, keys, BATCH, groups, of_values),
    ]
    offset = 650 if name == "cache" else 0
    drop = dropout_of(device, queries, keys, name != "window") if drops else None
    rest = Mask(**rules), SCORES.get(name, PLAIN_SCORES), offset, drop
    wide = [x.detach().double().requires_grad_() for x in given]
    out, lse = attention_forward(*given, *rest, backend="triton")
    truth, of_truth = attention_forward(*wide, *rest, backend="reference")
    dout = drawn(device, dtype, *out.shape).detach()
    found = torch.autograd.grad(out, given, dout)
    expected = torch.autograd.grad(truth, wide, dout.double())
    close(out, truth, dtype, "out")
    close(lse.exp(), of_truth.exp(), dtype, "lse")
    for of, got, want in zip("qkv", found, expected, strict=True):
        close(got, want, dtype, of)
    given = [x.detach() for x in given]
    again = attention_backward(dout, *given, out.detach(), lse, *rest, backend="triton")
    assert all(map(torch.equal, found, again))  # sums have one order


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCES[dtype], f"{name}: {error:.1e} of the largest value"


@ON_GPU
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "indices"])
def test_the_bits_of_dropout_on_a_gpu_are_exactly_those_of_the_hash(
    columns: bool, device: torch.device
) -> None:
    """With one-hot values and equal scores, the output shows which keys a query keeps."""
    queries, keys, heads = 700, 256, 3
    drop = dropout_of(device, queries, keys, columns)
    q = torch.zeros(queries, BATCH, heads, 64, device=device, dtype=torch.bfloat16)
    k = torch.zeros(keys, BATCH, heads, 64, device=device, dtype=torch.bfloat16)
    v = torch.eye(keys, device=device, dtype=torch.bfloat16)[:, None, None]
    v = v.expand(-1, BATCH, heads, -1).contiguous().requires_grad_()
    out = attention(q, k, v, Mask(causal=False), dropout=drop, backend="triton")
    every = slice(0, heads), slice(0, queries), slice(0, keys)
    kept = drop.kept(slice(0, BATCH), every[0], keys)(*every[1:]) != 0
    assert torch.equal(out.permute(1, 2, 0, 3) > 0, kept)
    for row in (0, 301, 699):  # dv of one query: its kept keys
        dout = torch.zeros_like(out)
        dout[row] = 1
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        assert torch.equal(dv[..., 0].permute(1, 2, 0) > 0, kept[:, :, row])


@ON_GPU
def test_tokens_more_than_two_billion_elements_apart(device: torch.device) -> None:
    fused = torch.zeros(4096, 1, 2**19 + 2**17, dtype=torch.bfloat16, device=device)
    parts = [fused[..., -64 * (i + 1) :][..., :64].unsqueeze(2) for i in range(3)]
    for each in parts:
        each.copy_(drawn(device, torch.bfloat16, *each.shape).detach())
    assert fused.numel() > 2**31 and parts[0].stride(0) * 4095 > 2**31
    far, near = parts, [x.contiguous() for x in parts]
    results = []
    for given in (far, near):
        leaves = [x.detach().requires_grad_() for x in given]
        out = attention(*leaves, Mask(), backend="triton")
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    assert all(map(torch.equal, *results))
