"""One token of the scan of Mamba-2, as in decoding: one kernel, without gradients.

A program updates some channels of a head's state. It reads and writes the state once, which bounds
it: 8 bytes of a float32 state for about 6 operations.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import accumulator, accumulator_dtype, power_of_two
from megatron_kernels.triton_kernels.ssd_parts import limit_numbers, limited, softplus

_ELEMENTS = 4096
"""Numbers of a state that one program holds."""


@triton.jit(do_not_specialize=("heads", "per_group"))
def _step(
    X, DT, A, B, C, SCALE, BIAS, REAL, INITIAL, Y, FINAL, heads, per_group,
    x_b, x_n, b_b, b_g, c_b, c_g, dt_b, dt_n, low, low_rest, high, high_rest,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, LIMITED: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (D + ROWS - 1) // ROWS
    line = (tl.program_id(0) // tiles).to(tl.int64)
    sample, head = line // heads, line % heads
    group = head // per_group
    of_d = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    of_k = tl.arange(0, BLOCK_K)
    raw = tl.load(DT + sample * dt_b + head * dt_n).to(ACC)
    if HAS_BIAS:
        raw += tl.load(BIAS + head).to(ACC)
    step = limited(softplus(raw), low, low_rest, high, high_rest, LIMITED, ACC)
    if HAS_DOCUMENTS:
        real = tl.load(REAL + sample) % 2 == 0
        step = tl.where(real, step, 0.0)
    x = tl.load(X + sample * x_b + head * x_n + of_d, mask=of_d < D, other=0.0).to(ACC)
    b = tl.load(B + sample * b_b + group * b_g + of_k, mask=of_k < K, other=0.0).to(ACC)
    c = tl.load(C + sample * c_b + group * c_g + of_k, mask=of_k < K, other=0.0).to(ACC)
    inside = (of_d < D)[:, None] & (of_k < K)[None, :]
    at = line * (D * K) + of_d[:, None] * K + of_k[None, :]
    state = (step * x)[:, None] * b[None, :]
    if HAS_INITIAL:
        decay = tl.exp(step * tl.load(A + head).to(ACC))
        state += decay * tl.load(INITIAL + at, mask=inside, other=0.0).to(ACC)
    y = tl.sum(state * c[None, :], axis=1)
    if HAS_SCALE:
        y += tl.load(SCALE + head).to(ACC) * x
    if HAS_DOCUMENTS:
        y = tl.where(real, y, 0.0)
    tl.store(FINAL + at, state, mask=inside)
    tl.store(Y + line * D + of_d, y.to(Y.dtype.element_ty), mask=of_d < D)


def ssd_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    limits: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Returns the output and the state after one token, from the arguments of `ssd_forward`."""
    _, batch, heads, width = x.shape
    groups, channels = b.shape[2:]
    y = x.new_empty(x.shape)
    final = x.new_empty(batch, heads, width, channels, dtype=accumulator_dtype(x.dtype))
    of_k = power_of_two(channels)
    rows = min(power_of_two(width), max(1, _ELEMENTS // of_k))
    _step[(batch * heads * triton.cdiv(width, rows),)](
        x, dt, a, b, c, d, dt_bias, documents, state, y, final, heads, heads // groups,
        *x.stride()[1:3], *b.stride()[1:3], *c.stride()[1:3], *dt.stride()[1:],
        *limit_numbers(limits), HAS_SCALE=d is not None, HAS_BIAS=dt_bias is not None,
        HAS_DOCUMENTS=documents is not None, HAS_INITIAL=state is not None,
        LIMITED=bool(limits), D=width, K=channels, ROWS=rows, BLOCK_K=of_k,
        ACC=accumulator(x.dtype), num_warps=4,
    )  # fmt: skip
    return y, final
