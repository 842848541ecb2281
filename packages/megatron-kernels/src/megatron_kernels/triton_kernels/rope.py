"""Rotary position embedding of one tensor of heads, or of a fused projection.

A fused projection holds, for each query group, the heads of queries, then a key and a value. One
kernel rotates queries and keys and copies values, and its reverse is the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import accumulator, power_of_two

_HEADS: int = 8
"""Heads of one program."""


@triton.jit
def _move(
    SOURCE, TARGET, source, target, wanted, stride, COPIES: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Writes elements, summed over copies of the source, which are `stride` elements apart."""
    x = tl.load(SOURCE + source, mask=wanted).to(ACC)
    for copy in range(1, COPIES):
        x += tl.load(SOURCE + source + copy * stride, mask=wanted).to(ACC)
    tl.store(TARGET + target, x, mask=wanted)


@triton.jit
def _rotate(
    SOURCE, TARGET, source, target, wanted, first, second, c, s, stride,
    COPIES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Writes one rotated pair for each element of a block of heads and pairs.

    Sums over copies of the source, which are `stride` elements apart.
    """
    one = tl.load(SOURCE + source + first, mask=wanted).to(ACC)
    two = tl.load(SOURCE + source + second, mask=wanted).to(ACC)
    for copy in range(1, COPIES):
        one += tl.load(SOURCE + source + first + copy * stride, mask=wanted).to(ACC)
        two += tl.load(SOURCE + source + second + copy * stride, mask=wanted).to(ACC)
    tl.store(TARGET + target + first, one * c - two * s, mask=wanted)
    tl.store(TARGET + target + second, two * c + one * s, mask=wanted)


@triton.jit
def _rope(
    PACKED, Q, K, V, COS, SIN, b, heads, queries, half, d, direction,
    packed_s, packed_b, packed_n, q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, cos_s, cos_b,
    HAS_KV: tl.constexpr, COPIES: tl.constexpr, REVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACC: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, sample = token // b, token % b
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = head < heads
    if HAS_KV:
        group, role = head // (queries + 2), head % (queries + 2)
    else:
        group, role = head // queries, head % queries
    packed = row * packed_s + sample * packed_b + head.to(tl.int64) * packed_n
    q = row * q_s + sample * q_b + (group * queries + role).to(tl.int64) * q_n
    k = row * k_s + sample * k_b + group.to(tl.int64) * COPIES * k_n
    v = row * v_s + sample * v_b + group.to(tl.int64) * COPIES * v_n
    pair = tl.arange(0, HALF)
    here = pair < half
    c = tl.load(COS + row * cos_s + sample * cos_b + pair, mask=here).to(ACC)[None, :]
    s = tl.load(SIN + row * cos_s + sample * cos_b + pair, mask=here).to(ACC)[None, :]
    s = s * direction
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    first, second = first[None, :], second[None, :]
    of_q = (exists & (role < queries))[:, None] & here[None, :]
    of_k = (exists & (role == queries))[:, None] & here[None, :]
    if REVERSE:
        _rotate(Q, PACKED, q[:, None], packed[:, None], of_q, first, second, c, s, 0, 1, ACC)
        if HAS_KV:
            _rotate(
                K, PACKED, k[:, None], packed[:, None], of_k, first, second, c, s, k_n, COPIES, ACC
            )
    else:
        _rotate(PACKED, Q, packed[:, None], q[:, None], of_q, first, second, c, s, 0, 1, ACC)
        if HAS_KV:
            _rotate(PACKED, K, packed[:, None], k[:, None], of_k, first, second, c, s, 0, 1, ACC)
    if REST > 0:  # channels that are not rotated
        rest = 2 * half + tl.arange(0, REST)
        left = (rest < d)[None, :]
        of_q = (exists & (role < queries))[:, None] & left
        of_k = (exists & (role == queries))[:, None] & left
        rest = rest[None, :]
        if REVERSE:
            _move(Q, PACKED, q[:, None] + rest, packed[:, None] + rest, of_q, 0, 1, ACC)
            if HAS_KV:
                _move(K, PACKED, k[:, None] + rest, packed[:, None] + rest, of_k, k_n, COPIES, ACC)
        else:
            _move(PACKED, Q, packed[:, None] + rest, q[:, None] + rest, of_q, 0, 1, ACC)
            if HAS_KV:
                _move(PACKED, K, packed[:, None] + rest, k[:, None] + rest, of_k, 0, 1, ACC)
    if HAS_KV:
        channel = tl.arange(0, WIDTH)
        of_v = (exists & (role == queries + 1))[:, None] & (channel < d)[None, :]
        channel = channel[None, :]
        if REVERSE:
            _move(
                V, PACKED, v[:, None] + channel, packed[:, None] + channel, of_v, v_n, COPIES, ACC
            )
        else:
            _move(PACKED, V, packed[:, None] + channel, v[:, None] + channel, of_v, 0, 1, ACC)


def rope_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: int) -> Tensor:
    """Returns `x` rotated by the angles, or back for direction -1."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, (out, out, out), cos, sin, interleaved, direction, x.shape[2], has_kv=False)
    return out


def rope_unpack(
    fused: Tensor, cos: Tensor, sin: Tensor, queries: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated queries and keys, and values, of a fused projection."""
    s, b, groups, _, d = fused.shape
    q = fused.new_empty(s, b, groups * queries, d)
    k, v = fused.new_empty(s, b, groups, d), fused.new_empty(s, b, groups, d)
    packed = fused.view(s, b, groups * (queries + 2), d)
    _launch(packed, (q, k, v), cos, sin, interleaved, 1, queries, has_kv=True)
    return q, k, v


def rope_pack(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, queries: int, interleaved: bool
) -> Tensor:
    """Returns the gradient of the fused projection.

    Keys and values have a gradient for each group, or one for each head, which are summed.
    """
    s, b, heads, d = dq.shape
    groups = heads // queries
    out = dk.new_empty(s, b, groups, queries + 2, d)
    packed, grads = out.view(s, b, groups * (queries + 2), d), (dq, dk, dv)
    copies = dk.shape[2] // groups
    _launch(packed, grads, cos, sin, interleaved, -1, queries, has_kv=True, copies=copies)
    return out


def _launch(
    packed: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    direction: int,
    queries: int,
    *,
    has_kv: bool,
    copies: int = 0,
) -> None:
    """Launches the kernel; with `copies` of keys and values from heads to the packed tensor."""
    s, b, n, d = packed.shape
    half = cos.shape[-1]
    if not packed.numel():
        return
    strides = [stride for t in (packed, *heads) for stride in t.stride()[:3]]
    _rope[(s * b, triton.cdiv(n, _HEADS))](
        packed, *heads, cos, sin, b, n, queries, half, d, direction,
        *strides, cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0,
        HAS_KV=has_kv, COPIES=max(copies, 1), REVERSE=copies > 0, INTERLEAVED=interleaved,
        ACC=accumulator(torch.promote_types(packed.dtype, cos.dtype)), HEADS=_HEADS,
        HALF=power_of_two(half), REST=power_of_two(d - 2 * half) if d > 2 * half else 0,
        WIDTH=power_of_two(d),
    )  # fmt: skip
