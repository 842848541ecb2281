"""The scan of Mamba-2, backward, in four kernels; they compute what the forward pass did not save.

With `u = step x`, the state `S` before a chunk, the gradient `H` of the state after it, decays `e`
from its start, `r` to its end and `w` between two tokens, the outputs of a chunk and its last state

    y_i = e_i S C_i + sum_{j <= i} w_ij (C_i . B_j) u_j      S' = f S + sum_j r_j u_j B_j^T

have the gradients below, with `q_ij = w_ij (dy_i . u_j)`:

    dS = f H + sum_i e_i dy_i C_i^T      du_j = sum_i w_ij (C_i . B_j) dy_i + r_j H B_j
    dC_i = e_i S^T dy_i + sum_j q_ij B_j      dB_j = r_j H^T u_j + sum_i q_ij C_i

1. State gradients: the mirror of the states, from the last chunk to the first.
2. Value gradients: `dx`, with the heads of a group one after another as in the outputs.
3. Group gradients: `dB` and `dC`, summed over heads in registers. If several programs share a
   group, torch adds up their sums.
4. Step gradients: the mirror of the steps.

The gradient of the logarithm of a token's decay is the sum of all terms whose path passes it: of
pairs with `j < token <= i`, of reads of `S` at `i >= token`, of entries in `S'` of `j < token`, and
of `f`. Pairs are counted as rows less columns of one matrix in float32, without its diagonal, since
products of rounded outputs and gradients would not cancel.

All are bound by memory, with the sizes in `ssd_forward`: in units of the bytes of `x`, the first
moves 3 (it is bound by its chain of chunks if heads and samples are few), the second 5, the third
6, the fourth less than 1. One kernel for the second and third would move 7, but its tiles exceed
the registers. No addition is atomic, so two runs on a device give the same bits.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    accumulator_dtype,
    power_of_two,
)
from megatron_kernels.triton_kernels.rows import load_rows, store_rows
from megatron_kernels.triton_kernels.ssd_parts import (
    UNSPECIALIZED,
    block,
    decay_between,
    decay_from_start,
    decay_to_end,
    document_before,
    end_of_chunk,
    group_options,
    heads_of_program,
    limit_numbers,
    limited,
    load_documents,
    softplus,
    splits_of_heads,
    tile_options,
    tiling,
    token_options,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _state_gradients(
    DY, C, DOCUMENTS, LOG, LAST, GRADIENTS, INITIAL, s, batch, heads, per_group,
    dy_s, dy_b, dy_n, c_s, c_b, c_g,
    HAS_LAST: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_K: tl.constexpr, ACC: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a head's state after each chunk, and that of the initial state."""
    tiles_k: tl.constexpr = (K + WIDE_K - 1) // WIDE_K
    tiles: tl.constexpr = (D + WIDE_D - 1) // WIDE_D * tiles_k
    line = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    sample, head = line // heads, line % heads
    of_d = tile // tiles_k * WIDE_D + tl.arange(0, WIDE_D)
    of_k = tile % tiles_k * WIDE_K + tl.arange(0, WIDE_K)
    inside = (of_d < D)[:, None] & (of_k < K)[None, :]
    at = line * (D * K) + of_d[:, None] * K + of_k[None, :]
    DY += sample * dy_b + head * dy_n
    C += sample * c_b + head // per_group * c_g
    gradient = tl.zeros((WIDE_D, WIDE_K), ACC)
    if HAS_LAST:
        gradient = tl.load(LAST + at, mask=inside, other=0.0).to(ACC)
    chunks = tl.cdiv(s, TOKENS)
    size = tl.full((), batch * heads, tl.int64) * (D * K)
    for back in range(chunks):
        chunk = chunks - 1 - back
        start = chunk * TOKENS
        into = GRADIENTS + chunk * size + at
        tl.store(into, gradient.to(GRADIENTS.dtype.element_ty), mask=inside)
        token = start + tl.arange(0, TOKENS)
        log = tl.load(LOG + line * s + token, mask=token < s, other=0.0)
        document, real = load_documents(DOCUMENTS, sample, token, s, HAS_DOCUMENTS)
        before = document_before(DOCUMENTS, sample, start, s, HAS_DOCUMENTS)
        total, final = end_of_chunk(log, document, token, tl.minimum(start + TOKENS, s) - 1)
        decay = decay_from_start(log, document, before, HAS_DOCUMENTS)
        dy = load_rows(DY, token, of_d, dy_s, s, D, True, ACC) * decay[:, None]
        if HAS_DOCUMENTS:
            dy = tl.where((real & (document == before))[:, None], dy, 0.0)
            gradient = tl.where(final == before, gradient, 0.0)
        c = load_rows(C, token, of_k, c_s, s, K, True, OPERAND)
        added = tl.dot(tl.trans(dy).to(OPERAND), c, input_precision=PRECISION, out_dtype=ACC)
        gradient = gradient * tl.exp(total) + added
    tl.store(INITIAL + at, gradient.to(INITIAL.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _value_gradients(
    X, B, C, SCALE, DOCUMENTS, STEP, LOG, GRADIENTS, DY, DX, TERMS, s, batch, heads, per_group,
    x_s, x_b, x_n, b_s, b_b, b_g, c_s, c_b, c_g, dy_s, dy_b, dy_n,
    HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Computes `dx` and three `TERMS` of each token. Tiles have `j` in rows and `i` in columns."""
    first, group, line, sample = heads_of_program(batch, heads, per_group, MEMBERS)
    start = line // batch * TOKENS
    token = start + tl.arange(0, TOKENS)
    inside = token < s
    of_d, of_k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    b = load_rows(B + sample * b_b + group * b_g, token, of_k, b_s, s, K, True, OPERAND)
    c = load_rows(C + sample * c_b + group * c_g, token, of_k, c_s, s, K, True, OPERAND)
    scores = tl.dot(b, tl.trans(c), input_precision=PRECISION, out_dtype=ACC)
    document, real = load_documents(DOCUMENTS, sample, token, s, HAS_DOCUMENTS)
    last = tl.minimum(start + TOKENS, s) - 1
    all_terms = tl.full((), batch * heads, tl.int64) * s
    for member in range(MEMBERS):
        head = (first + member).to(tl.int64)
        of_head = sample * heads + head
        step = tl.load(STEP + of_head * s + token, mask=inside, other=0.0)
        log = tl.load(LOG + of_head * s + token, mask=inside, other=0.0)
        x = load_rows(X + sample * x_b + head * x_n, token, of_d, x_s, s, D, True, OPERAND)
        dy = load_rows(DY + sample * dy_b + head * dy_n, token, of_d, dy_s, s, D, True, OPERAND)
        if HAS_DOCUMENTS:
            dy = tl.where(real[:, None], dy, 0.0)
        at = (line // batch * batch * heads + of_head) * (D * K)
        gradient = load_rows(GRADIENTS + at, of_d, of_k, K, D, K, True, OPERAND)
        total, final = end_of_chunk(log, document, token, last)
        du = tl.dot(b, tl.trans(gradient), input_precision=PRECISION, out_dtype=ACC)
        du *= decay_to_end(log, document, total, final, HAS_DOCUMENTS)[:, None]
        entries = tl.sum(du * x.to(ACC), axis=1)
        weights = scores * decay_between(
            token[:, None], token[None, :], log[:, None], log[None, :],
            document[:, None], document[None, :], s, HAS_DOCUMENTS,
        )  # fmt: skip
        products = tl.dot(x, tl.trans(dy), input_precision=PRECISION, out_dtype=ACC)
        du += tl.dot(weights.to(OPERAND), dy, input_precision=PRECISION, out_dtype=ACC)
        dx = du * step[:, None]
        if HAS_SCALE:
            dx += tl.load(SCALE + head).to(ACC) * dy.to(ACC)
        INTO = DX + sample * heads * D + head * D
        store_rows(INTO, dx.to(DX.dtype.element_ty), token, of_d, batch * heads * D, s, D)
        products *= weights
        own = tl.sum(tl.where(token[:, None] == token[None, :], products, 0.0), axis=1)
        columns = tl.sum(tl.where(token[:, None] < token[None, :], products, 0.0), axis=1)
        rows = tl.where(token[:, None] < token[None, :], products * step[:, None], 0.0)
        terms = TERMS + of_head * s + token
        tl.store(terms, entries + own + columns, mask=inside)
        tl.store(terms + all_terms, tl.sum(rows, axis=0) - step * columns, mask=inside)
        tl.store(terms + 2 * all_terms, step * entries, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _group_gradients(
    X, B, C, DOCUMENTS, STEP, LOG, STATES, GRADIENTS, DY, DB, DC, READS, OF_DECAYS, OF_SCALES,
    s, batch, heads, per_group, x_s, x_b, x_n, b_s, b_b, b_g, c_s, c_b, c_g, dy_s, dy_b, dy_n,
    HAS_DOCUMENTS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Computes `dB` and `dC` of ``MEMBERS`` heads in a chunk.

    It also stores the terms of `e` as ``READS`` `[b, n, s]`, those of `f` as ``OF_DECAYS``, and
    those of the gradient of the factor of `x` as ``OF_SCALES`` `[chunks, b, n]`.
    """
    groups = heads // per_group
    first, group, line, sample = heads_of_program(batch, heads, per_group, MEMBERS)
    start = line // batch * TOKENS
    token = start + tl.arange(0, TOKENS)
    inside = token < s
    of_d, of_k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    b = load_rows(B + sample * b_b + group * b_g, token, of_k, b_s, s, K, True, OPERAND)
    c = load_rows(C + sample * c_b + group * c_g, token, of_k, c_s, s, K, True, OPERAND)
    document, real = load_documents(DOCUMENTS, sample, token, s, HAS_DOCUMENTS)
    before = document_before(DOCUMENTS, sample, start, s, HAS_DOCUMENTS)
    last = tl.minimum(start + TOKENS, s) - 1
    diagonal = of_d[:, None] == of_d[None, :]
    db = tl.zeros((TOKENS, BLOCK_K), ACC)
    dc = tl.zeros((TOKENS, BLOCK_K), ACC)
    of_scores = tl.zeros((TOKENS, TOKENS), ACC)
    for member in range(MEMBERS):
        head = (first + member).to(tl.int64)
        of_head = sample * heads + head
        step = tl.load(STEP + of_head * s + token, mask=inside, other=0.0)
        log = tl.load(LOG + of_head * s + token, mask=inside, other=0.0)
        x = load_rows(X + sample * x_b + head * x_n, token, of_d, x_s, s, D, True, OPERAND)
        dy = load_rows(DY + sample * dy_b + head * dy_n, token, of_d, dy_s, s, D, True, OPERAND)
        if HAS_DOCUMENTS:
            dy = tl.where(real[:, None], dy, 0.0)
        at = (line // batch * batch * heads + of_head) * (D * K)
        state = load_rows(STATES + at, of_d, of_k, K, D, K, True, OPERAND)
        gradient = load_rows(GRADIENTS + at, of_d, of_k, K, D, K, True, OPERAND)
        total, final = end_of_chunk(log, document, token, last)
        products = tl.dot(x, tl.trans(dy), input_precision=PRECISION, out_dtype=ACC)
        own = tl.sum(tl.where(token[:, None] == token[None, :], products, 0.0), axis=1)
        of_chunk = line * tl.full((), heads, tl.int64) + head
        tl.store(OF_SCALES + of_chunk, tl.sum(own, axis=0))
        of_scores += products * step[:, None] * decay_between(
            token[:, None], token[None, :], log[:, None], log[None, :],
            document[:, None], document[None, :], s, HAS_DOCUMENTS,
        )  # fmt: skip
        entering = step * decay_to_end(log, document, total, final, HAS_DOCUMENTS)
        entering = (x.to(ACC) * entering[:, None]).to(OPERAND)
        db += tl.dot(entering, gradient, input_precision=PRECISION, out_dtype=ACC)
        from_start = decay_from_start(log, document, before, HAS_DOCUMENTS)
        leaving = dy.to(ACC) * from_start[:, None]
        dc += tl.dot(leaving.to(OPERAND), state, input_precision=PRECISION, out_dtype=ACC)
        read = tl.dot(c, tl.trans(state), input_precision=PRECISION, out_dtype=ACC)
        tl.store(READS + of_head * s + token, tl.sum(read * leaving, axis=1), mask=inside)
        # Sums of products of two tiles: the diagonal of their product, computed off registers.
        both = tl.dot(state, tl.trans(gradient), input_precision=PRECISION, out_dtype=ACC)
        whole = tl.sum(tl.sum(tl.where(diagonal, both, 0.0), axis=1), axis=0)
        whole *= decay_from_start(total, final, before, HAS_DOCUMENTS)
        tl.store(OF_DECAYS + of_chunk, whole)
    db += tl.dot(of_scores.to(OPERAND), c, input_precision=PRECISION, out_dtype=ACC)
    dc += tl.dot(tl.trans(of_scores).to(OPERAND), b, input_precision=PRECISION, out_dtype=ACC)
    # Programs that share a group write parts of a sum, one after another.
    part = (first % per_group // MEMBERS).to(tl.int64) * s * batch * groups * K
    into = part + sample * groups * K + group * K
    row = batch * groups * K
    store_rows(DB + into, db.to(DB.dtype.element_ty), token, of_k, row, s, K)
    store_rows(DC + into, dc.to(DC.dtype.element_ty), token, of_k, row, s, K)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _step_gradients(
    DT, A, BIAS, DOCUMENTS, STEP, TERMS, READS, OF_DECAYS, DDT, OF_RATES, OF_BIASES,
    s, batch, heads, dt_s, dt_b, dt_n, low, low_rest, high, high_rest, HAS_BIAS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, LIMITED: tl.constexpr, ACC: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Computes `ddt`, and the terms of the gradients of rates and biases `[chunks, b, n]`."""
    blocks = tl.cdiv(heads, HEADS)
    line = tl.program_id(0) // blocks
    sample = (line % batch).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    token = line // batch * TOKENS + tl.arange(0, TOKENS)
    exists = head < heads
    known = exists[None, :] & (token < s)[:, None]
    at = token.to(tl.int64)[:, None] * dt_s + head[None, :] * dt_n
    x = tl.load(DT + sample * dt_b + at, mask=known, other=0.0).to(ACC)
    if HAS_BIAS:
        x += tl.load(BIAS + head, mask=exists, other=0.0).to(ACC)[None, :]
    at = (sample * heads + head)[None, :] * s + token[:, None]
    all_terms = tl.full((), batch * heads, tl.int64) * s
    of_step = tl.load(TERMS + at, mask=known, other=0.0)
    after = tl.load(TERMS + all_terms + at, mask=known, other=0.0)
    after += tl.load(READS + at, mask=known, other=0.0)
    entries = tl.load(TERMS + 2 * all_terms + at, mask=known, other=0.0)
    of_chunk = line * tl.full((), heads, tl.int64) + head
    of_log = tl.cumsum(after, axis=0, reverse=True) + (tl.cumsum(entries, axis=0) - entries)
    of_log += tl.load(OF_DECAYS + of_chunk, mask=exists, other=0.0)[None, :]
    of_step += tl.load(A + head, mask=exists, other=0.0).to(ACC)[None, :] * of_log
    if LIMITED:
        found = softplus(x)
        cut = limited(found, low, low_rest, high, high_rest, LIMITED, ACC)
        of_step = tl.where(found == cut, of_step, found * 0.0)
    ddt = of_step * tl.where(x > 20.0, 1.0, tl.sigmoid(x))
    _, real = load_documents(DOCUMENTS, sample, token, s, HAS_DOCUMENTS)
    ddt = tl.where(real[:, None], ddt, 0.0)
    into = (token.to(tl.int64)[:, None] * batch + sample) * heads + head[None, :]
    tl.store(DDT + into, ddt.to(DDT.dtype.element_ty), mask=known)
    step = tl.load(STEP + at, mask=known, other=0.0)
    of_rate = tl.sum(tl.where(real[:, None], step * of_log, 0.0), axis=0)
    tl.store(OF_RATES + of_chunk, of_rate, mask=exists)
    tl.store(OF_BIASES + of_chunk, tl.sum(ddt, axis=0), mask=exists)


def ssd_backward(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    states: Tensor,
    step: Tensor,
    log: Tensor,
    chunk: int,
    limits: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, dt, a, b, c, d, dt_bias and state; those of None are empty.

    Args:
        dy: Gradient of the outputs `[s, b, n, d]`, channels next to one another in memory.
        dlast: Gradient of the last state `[b, n, d, k]`, contiguous. None means zero.
        x: As in `ssd_forward`, like the arguments without a description.
        dt: Steps.
        a: Rates.
        b: What is added.
        c: What is read.
        d: Factor of `x`.
        dt_bias: Bias of the steps.
        documents: Documents.
        state: State before the first token.
        states: States before chunks.
        step: Steps after the softplus.
        log: Logarithms of decays.
        chunk: Tokens of a chunk.
        limits: Smallest and largest step.
    """
    s, batch, heads, width = x.shape
    groups, channels = b.shape[2:]
    per_group, chunks = heads // groups, len(states)
    size = tiling(x, chunk)
    splits = splits_of_heads(x.device, chunks * batch * groups, per_group)
    wide = accumulator_dtype(x.dtype)
    initial = x.new_empty(states.shape[1:], dtype=wide if state is None else state.dtype)
    gradients = states.new_empty(states.shape)
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    sums = (b.shape, b.dtype) if splits == 1 else ((splits, *b.shape), wide)
    db, dc = (b.new_empty(sums[0], dtype=sums[1]) for _ in range(2))
    terms, reads = x.new_empty(4, *step.shape, dtype=wide).split((3, 1))
    of_decays, *of_heads = x.new_empty(4, chunks * batch, heads, dtype=wide)
    of_scales, of_rates, of_biases = of_heads
    options = token_options(x, documents, chunk)
    tiles = tile_options(x, channels)
    in_groups = group_options(x, channels, per_group // splits)
    sizes = (s, batch, heads, per_group)
    of_x, of_b, of_c, of_dy = (each.stride()[:3] for each in (x, b, c, dy))
    of_d, of_k = (min(size.width, block(each)) for each in (width, channels))
    programs = batch * heads * triton.cdiv(width, of_d) * triton.cdiv(channels, of_k)
    _state_gradients[(programs,)](
        dy, c, documents, log, dlast, gradients, initial, *sizes, *of_dy, *of_c,
        HAS_LAST=dlast is not None, WIDE_D=of_d, WIDE_K=of_k, **options, **tiles,
        num_warps=size.warps[0], num_stages=size.stages[0],
    )  # fmt: skip
    _value_gradients[(chunks * batch * groups * splits,)](
        x, b, c, d, documents, step, log, gradients, dy, dx, terms,
        *sizes, *of_x, *of_b, *of_c, *of_dy, HAS_SCALE=d is not None,
        **options, **tiles, **in_groups, num_warps=size.warps[1], num_stages=size.stages[1],
    )  # fmt: skip
    _group_gradients[(chunks * batch * groups * splits,)](
        x, b, c, documents, step, log, states, gradients, dy, db, dc, reads, of_decays,
        of_scales, *sizes, *of_x, *of_b, *of_c, *of_dy,
        **options, **tiles, **in_groups, num_warps=size.warps[2], num_stages=size.stages[2],
    )  # fmt: skip
    some = power_of_two(min(heads, 32))
    _step_gradients[(chunks * batch * triton.cdiv(heads, some),)](
        dt, a, dt_bias, documents, step, terms, reads, of_decays, ddt, of_rates,
        of_biases, *sizes[:3], *dt.stride(), *limit_numbers(limits),
        HAS_BIAS=dt_bias is not None, LIMITED=bool(limits), HEADS=some, **options, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        db, dc = (each.sum(0).to(b.dtype) for each in (db, dc))
    dd, da, dbias = (each.sum(0) for each in of_heads)
    return (
        dx,
        ddt,
        da.to(a.dtype),
        db,
        dc,
        x.new_empty(0) if d is None else dd.to(d.dtype),
        x.new_empty(0) if dt_bias is None else dbias.to(dt_bias.dtype),
        x.new_empty(0) if state is None else initial,
    )
