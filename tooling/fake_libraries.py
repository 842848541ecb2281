"""Plain replacements of optional libraries that need a GPU.

The functions have the parameters of the published ones, refuse what those refuse, and compute with
torch in float64. Adapters are tested with them where the libraries cannot run.
"""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


def install(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """Makes modules importable by name; `__` stands for a dot."""
    for name, content in modules.items():
        dotted = name.replace("__", ".")
        module = ModuleType(dotted)
        vars(module).update(vars(content))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, dotted, module)


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    slopes: Tensor | None = None,
) -> Tensor:
    """Returns attention of `[s, n, d]`, aligned at the last query and key, in float64."""
    queries, keys = q.shape[0], k.shape[0]
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    left, right = window_size
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    copies = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(copies, 1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("snd,tnd->nst", q.double(), wide_k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    p = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1).nan_to_num()
    return torch.einsum("nst,tnd->snd", p, wide_v).to(q.dtype)


def check_heads(q: Tensor, k: Tensor, v: Tensor, dims: int) -> None:
    """Raises unless the tensors are those that the kernels take."""
    for x in (q, k, v):
        assert x.dim() == dims and x.dtype in HALF and x.stride(-1) == 1
        assert x.shape[-1] == q.shape[-1] <= 256
    assert k.shape == v.shape and q.shape[-2] % k.shape[-2] == 0


def dense(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """Returns attention of a batch `[b, s, n, d]`."""
    check_heads(q, k, v, 4)
    return torch.stack([written_out(*row, *options) for row in zip(q, k, v, strict=True)])


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> Tensor:
    """Returns attention of sequences one after another `[tokens, n, d]`."""
    check_heads(q, k, v, 3)
    lengths = []
    for offsets, longest, x in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        assert offsets.dtype == torch.int32 and offsets.device == x.device and offsets[0] == 0
        assert int(offsets[-1]) == len(x) and type(longest) is int
        lengths.append(offsets.diff().tolist())
        assert min(lengths[-1]) >= 0 and longest >= max(lengths[-1])
    parts = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    return torch.cat([written_out(*part, *options) for part in parts])


class FlashAttn2(SimpleNamespace):
    """The module `flash_attn`; `calls` has the name and the options of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

        def flash_attn_func(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            dropout_p: float = 0.0,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size: tuple[int, int] = (-1, -1),
            softcap: float = 0.0,
            alibi_slopes: Tensor | None = None,
            deterministic: bool = False,
            return_attn_probs: bool = False,
        ) -> Tensor:
            assert dropout_p == 0 and not return_attn_probs
            assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
            self.calls.append(("dense", {"deterministic": deterministic}))
            return dense(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)

        def flash_attn_varlen_func(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cu_seqlens_q: Tensor,
            cu_seqlens_k: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            dropout_p: float = 0.0,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size: tuple[int, int] = (-1, -1),
            softcap: float = 0.0,
            alibi_slopes: Tensor | None = None,
            deterministic: bool = False,
            return_attn_probs: bool = False,
            block_table: Tensor | None = None,
        ) -> Tensor:
            assert dropout_p == 0 and not return_attn_probs and block_table is None
            self.calls.append(("varlen", {"deterministic": deterministic}))
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            options = softmax_scale, causal, window_size, softcap, alibi_slopes
            return varlen(q, k, v, *lengths, *options)

        super().__init__(
            flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
        )


class FlashAttn3(SimpleNamespace):
    """The module `flash_attn_interface`; an early version returns the log-sum-exp too."""

    def __init__(self, returns_lse: bool = False) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

        def returned(out: Tensor) -> Any:
            return (out, out[..., 0]) if returns_lse else out

        def flash_attn_func(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            softmax_scale: float | None = None,
            causal: bool = False,
            qv: Tensor | None = None,
            q_descale: Tensor | None = None,
            k_descale: Tensor | None = None,
            v_descale: Tensor | None = None,
            window_size: tuple[int, int] = (-1, -1),
            attention_chunk: int = 0,
            softcap: float = 0.0,
            num_splits: int = 1,
            pack_gqa: bool | None = None,
            deterministic: bool = False,
            sm_margin: int = 0,
            return_attn_probs: bool = False,
        ) -> Any:
            self.calls.append(("dense", {"deterministic": deterministic}))
            return returned(dense(q, k, v, softmax_scale, causal, window_size, softcap))

        def flash_attn_varlen_func(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cu_seqlens_q: Tensor,
            cu_seqlens_k: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            seqused_q: Tensor | None = None,
            seqused_k: Tensor | None = None,
            softmax_scale: float | None = None,
            causal: bool = False,
            qv: Tensor | None = None,
            q_descale: Tensor | None = None,
            k_descale: Tensor | None = None,
            v_descale: Tensor | None = None,
            window_size: tuple[int, int] = (-1, -1),
            attention_chunk: int = 0,
            softcap: float = 0.0,
            num_splits: int = 1,
            pack_gqa: bool | None = None,
            deterministic: bool = False,
            sm_margin: int = 0,
            return_attn_probs: bool = False,
        ) -> Any:
            self.calls.append(("varlen", {"deterministic": deterministic}))
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            options = softmax_scale, causal, window_size, softcap
            return returned(varlen(q, k, v, *lengths, *options))

        super().__init__(
            flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
        )


def install_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Apex's norms importable."""

    def fused_layer_norm_affine(
        input: Tensor,  # noqa: A002 - the published name
        weight: Tensor,
        bias: Tensor,
        normalized_shape: torch.Size,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        assert tuple(normalized_shape) == (input.shape[-1],) and not memory_efficient
        return nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)

    def fused_rms_norm_affine(
        input: Tensor,  # noqa: A002 - the published name
        weight: Tensor,
        normalized_shape: torch.Size,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        assert tuple(normalized_shape) == (input.shape[-1],) and not memory_efficient
        return nn.functional.rms_norm(input, normalized_shape, weight, eps)

    norms = SimpleNamespace(
        fused_layer_norm_affine=fused_layer_norm_affine,
        fused_rms_norm_affine=fused_rms_norm_affine,
    )
    install(
        monkeypatch,
        apex=SimpleNamespace(),
        apex__normalization=SimpleNamespace(fused_layer_norm=norms),
        apex__normalization__fused_layer_norm=norms,
    )
