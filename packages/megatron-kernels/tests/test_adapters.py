"""Adapters of libraries that need a GPU, with plain replacements of the libraries."""

from collections.abc import Callable
from typing import Any

import fake_libraries
import pytest
import torch
from megatron_kernels import Mask, Scores, _compat, attention, layer_norm, rms_norm, takes_lengths
from megatron_kernels.ops.attention import flex as flex_attention
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.flash import (
    flash,
    flash_3,
    flash_3_unsupported_reason,
    flash_unsupported_reason,
)
from megatron_kernels.ops.attention.fused_blocks import fused_unsupported_reason
from megatron_kernels.ops.norm import apex
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

BFLOAT16 = {"rtol": 2e-2, "atol": 2e-2}
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 6, [4] * 4 + [2] * 2 + [-1] * 3], dtype=torch.int32)
MASKS: dict[str, Mask] = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=3),
    "two-sided window": Mask(causal=False, window=3),
    "documents": Mask(document_ids=DOCUMENTS),
    "documents both ways": Mask(document_ids=DOCUMENTS, causal=False),
    "documents and window": Mask(document_ids=DOCUMENTS, window=2),
}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def compared(adapter: Callable[..., Tensor], truth: Callable[..., Tensor], *arguments: Any) -> None:
    """Compares values and gradients."""
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    found, expected = adapter(*arguments), truth(*arguments)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, **BFLOAT16)
    weights = torch.linspace(0.5, 1.5, found.numel()).view(found.shape).to(found.dtype)
    for one, other in zip(
        torch.autograd.grad(found, leaves, weights),
        torch.autograd.grad(expected, leaves, weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **BFLOAT16)


@pytest.fixture(params=["2", "3", "early 3"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a version of flash-attn."""
    name, fake = {
        "2": ("flash_attn", fake_libraries.FlashAttn2),
        "3": ("flash_attn_interface", fake_libraries.FlashAttn3),
        "early 3": ("flash_attn_interface", lambda: fake_libraries.FlashAttn3(returns_lse=True)),
    }[request.param]
    module = fake()
    module.adapter = flash if name == "flash_attn" else flash_3
    fake_libraries.install(monkeypatch, **{name: module})
    return module


@pytest.mark.parametrize("name", MASKS)
def test_flash_attention_equals_the_reference(library: Any, name: str) -> None:
    mask, packed = MASKS[name], "documents" in name
    prepared = mask.prepare(9, 9, read_lengths=True)
    assert (prepared.runs is not None) == packed and not (packed and prepared.dense is not None)

    def truth(*arguments: Any) -> Tensor:
        return attention(*arguments[:3], mask, *arguments[4:], backend="reference")

    def adapter(*arguments: Any) -> Tensor:
        return library.adapter(AttentionCall(*arguments))

    for scores in (Scores(), Scores(scale=0.3, softcap=2.0)):
        compared(
            adapter,
            truth,
            drawn(9, 2, 4, 8),
            drawn(9, 2, 2, 8),
            drawn(9, 2, 2, 8),
            prepared,
            scores,
        )
    assert {kind for kind, _ in library.calls} == {"varlen" if packed else "dense"}


def test_flash_attention_of_a_cache_reads_no_key_after_the_last_query(library: Any) -> None:
    q, k, v = drawn(2, 2, 4, 8), drawn(9, 2, 4, 8), drawn(9, 2, 4, 8)
    for mask in (Mask(), Mask(window=3)):
        expected = attention(q, k, v, mask, query_offset=5, backend="reference")
        found = library.adapter(AttentionCall(q, k, v, mask, Scores(), 5))
        torch.testing.assert_close(found, expected, **BFLOAT16)


def test_flash_attention_has_slopes_in_version_2_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.install(monkeypatch, flash_attn=fake_libraries.FlashAttn2())
    q, k, v = (drawn(9, 2, 4, 8) for _ in range(3))
    scores = Scores(slopes=torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.bfloat16))
    expected = attention(q, k, v, Mask(), scores, backend="reference")
    call = AttentionCall(q, k, v, Mask(), scores)
    torch.testing.assert_close(flash(call), expected, **BFLOAT16)
    assert "slopes" in str(flash_3_unsupported_reason(call))


def test_flash_attention_is_deterministic_if_torch_is(library: Any) -> None:
    q = drawn(9, 2, 4, 8)
    for wanted in (True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            library.adapter(AttentionCall(q, q, q, Mask()))
        finally:
            torch.use_deterministic_algorithms(False)
        assert library.calls[-1][1] == {"deterministic": wanted}


def test_flash_attention_refuses_what_it_does_not_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor that claims to be on CUDA passes the check of the device."""

    class OnCuda(Tensor):
        is_cuda = True

    q = drawn(9, 2, 4, 8).detach().as_subclass(OnCuda)
    wide = drawn(9, 2, 4, 264).detach().as_subclass(OnCuda)
    documents = Mask(document_ids=DOCUMENTS)
    packed = documents.prepare(9, 9, read_lengths=True)
    for arguments, reason in (
        ((q, q, q, Mask(), Scores(sinks=torch.zeros(4))), "does not support sinks"),
        ((q.float(), q, q, Mask()), "needs float16 or bfloat16"),
        ((wide, wide, wide, Mask()), "head dimension 264 is above 256"),
        ((q, q, q[..., :4], Mask()), "value heads of 4 channels"),
        ((q, q, q, documents), "documents of unknown lengths"),
        ((q, q[:5], q[:5], Mask()), "5 keys do not end with query 9"),
        ((q, q[:5], q[:5], Mask(causal=False, window=3)), "5 keys do not end with query 9"),
        ((q[:5], q, q, Mask(causal=False, window=3)), "9 keys do not end with query 5"),
        ((q, q, q, Mask(), Scores(), 1), "9 keys do not end with query 10"),
        *(
            (given, "flash-attn is not")
            for given in (
                (q, q, q, Mask()),
                (q, q, q, packed),
                (q.half(), q.half(), q.half(), Mask(causal=False, window=3)),
                (q[:5], q, q, Mask()),  # keys after the last query are cut off
                (q[:5], q, q, Mask(causal=False)),
                (q, q[:5], q[:5], Mask(causal=False)),
                (*(wide[..., :256],) * 3, Mask()),
            )
        ),
    ):
        assert reason in str(flash_unsupported_reason(AttentionCall(*arguments))), reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert "Hopper" in str(flash_3_unsupported_reason(AttentionCall(q, q, q, Mask())))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert "flash-attn-3 is not" in str(flash_3_unsupported_reason(AttentionCall(q, q, q, Mask())))


def test_only_flash_backends_take_the_lengths_of_documents() -> None:
    assert takes_lengths("flash_attn") and takes_lengths("flash_attn_3,torch")
    assert not takes_lengths("auto") and not takes_lengths("torch,flash_attn")


def test_apex_norms_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.install_apex(monkeypatch)
    x, gain, shift = drawn(5, 3, 16), drawn(16), drawn(16)
    compared(
        lambda *a: apex.layer_norm(*a, 1e-5),
        lambda *a: layer_norm(*a, 1e-5, backend="reference"),
        *(x, gain, shift),
    )
    compared(
        lambda *a: apex.rms_norm(*a, 1e-5),
        lambda *a: rms_norm(*a, 1e-5, backend="reference"),
        *(x, gain),
    )


def test_flex_attention_on_a_cpu_has_no_backward_pass() -> None:
    q = drawn(9, 2, 4, 16, dtype=torch.float32)
    reason = flex_attention.flex_unsupported_reason
    call = AttentionCall(q, q, q, Mask())
    assert reason(call) == "on a CPU it has no backward pass"
    with torch.no_grad():
        assert reason(call) is None
        sinks = Scores(sinks=torch.zeros(4))
        assert "sinks" in str(reason(call._replace(scores=sinks)))
    assert attention.explain(q.detach(), q.detach(), q.detach(), Mask()).backend == "torch"


@pytest.mark.parametrize(
    "reason",
    [flex_attention.flex_unsupported_reason, fused_unsupported_reason],
    ids=["flex", "torch"],
)
def test_kernels_of_cuda_need_a_gpu_for_tensors_with_values(
    reason: Callable[[AttentionCall], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat, "has_gpu", lambda: False)
    with FakeTensorMode():
        q = torch.empty(9, 2, 4, 16, device="cuda")
        call = AttentionCall(q, q, q, Mask())
        assert reason(call) is None  # it has no values
        monkeypatch.setattr(_compat, "is_fake", lambda _: False)
        assert reason(call) == "the driver finds no GPU"
        monkeypatch.setattr(_compat, "has_gpu", lambda: True)
        assert reason(call) is None
