"""What the attention kernels share: the keys that a query may attend to, dropout and scores.

A tile is some queries and some keys, in either order of dims: functions take what belongs to the
queries and to the keys in shapes that broadcast.

Tokens are limited by index first. A program computes between which tokens its rows may attend, and
visits no tile outside. Inside, tiles between `full_start` and `full_end` need no mask.
"""

import triton
import triton.language as tl

from megatron_kernels.triton_kernels.dropout import folded, hashed

LOG2_E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(2**30)
SCANNED = tl.constexpr(1024)
PRECISION = tl.constexpr("tf32x3")  # three products of float32 rounded to tf32: about 21 bits


@triton.jit
def load_ids(IDS, rows, count, DOCUMENTS: tl.constexpr):
    """Returns the documents of tokens, -1 for padding and beyond the last token."""
    if DOCUMENTS:
        return tl.load(IDS + rows, mask=rows < count, other=-1).to(tl.int32)
    return rows


@triton.jit
def load_positions(POSITIONS, rows, count, offset, HAS_POSITIONS: tl.constexpr):
    """Returns the positions of tokens, by default the index among the keys."""
    if HAS_POSITIONS:
        return tl.load(POSITIONS + rows, mask=rows < count, other=0).to(tl.int32)
    return rows + offset


@triton.jit
def load_prefix(PREFIXES, prefix, sample, PREFIX: tl.constexpr):
    """Returns the prefix of a sample: 1 of `PREFIX` means a number for all, 2 a tensor."""
    if PREFIX == 2:
        return tl.load(PREFIXES + sample).to(tl.int32)
    return prefix


@triton.jit
def apply_mask(
    x, inside, query_id, key_id, query_position, key_position, ALLOWED, window, chunk, prefix,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Returns the scores of a tile with -inf where attending is forbidden.

    ``inside`` is whether the token exists, ``ALLOWED`` the tile of a dense mask in memory.
    """
    allowed = inside
    if DENSE:
        allowed = tl.load(ALLOWED, mask=inside, other=0) != 0
    else:
        if CAUSAL:
            earlier = key_position <= query_position
            if PREFIX:
                earlier = earlier | (key_position < prefix)
            allowed = allowed & earlier
        if WINDOW:
            distance = query_position - key_position
            allowed = allowed & (distance < window) & (distance > -window)
        if CHUNK:
            allowed = allowed & (query_position // chunk == key_position // chunk)
        if DOCUMENTS:
            allowed = allowed & (query_id == key_id) & (query_id >= 0)
    return tl.where(allowed, x, float("-inf"))


@triton.jit
def tokens_in_reach(
    IDS, POSITIONS, ids, position, inside, count, offset, window, chunk, prefix,
    OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    PREFIX: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns which tokens the tiles of a program cover: start, full_start, full_end and end.

    The program has rows of documents ``ids`` at ``position`` (if ``inside``): queries, or keys if
    not ``OF_QUERIES``. The tokens are the others: there are ``count``, of documents ``IDS`` at
    ``POSITIONS`` or, without positions, at ``offset`` and after. ``BLOCK`` are those of a tile.
    """
    start = tl.full((), 0, tl.int32)
    end = tl.full((), count, tl.int32)
    full_start = start
    full_end = end
    if not DENSE:
        least = tl.min(tl.where(inside, position, FAR))
        most = tl.max(tl.where(inside, position, -FAR))
        low = tl.full((), -FAR, tl.int32)
        high = tl.full((), FAR, tl.int32)
        full_low = low
        full_high = high
        if CAUSAL:
            if OF_QUERIES:
                high = most
                full_high = least
                if PREFIX:
                    high = tl.maximum(high, prefix - 1)
                    full_high = tl.maximum(full_high, prefix - 1)
            else:
                low = least
                full_low = most
                if PREFIX:
                    low = tl.where(least < prefix, -FAR, low)
                    full_low = tl.where(most < prefix, -FAR, full_low)
        if WINDOW:
            low = tl.maximum(low, least - window + 1)
            high = tl.minimum(high, most + window - 1)
            full_low = tl.maximum(full_low, most - window + 1)
            full_high = tl.minimum(full_high, least + window - 1)
        if CHUNK:
            low = tl.maximum(low, least // chunk * chunk)
            high = tl.minimum(high, most // chunk * chunk + chunk - 1)
        if not HAS_POSITIONS:
            start = tl.maximum(start, low - offset)
            end = tl.minimum(end, high - offset + 1)
        if DOCUMENTS or HAS_POSITIONS:
            low_id = tl.full((), 0, tl.int32)
            high_id = low_id
            if DOCUMENTS:
                known = inside & (ids >= 0)
                low_id = tl.min(tl.where(known, ids, FAR))
                high_id = tl.max(tl.where(known, ids, -1))
            first = end
            last = tl.minimum(start, end)
            for at in range(start // SCANNED * SCANNED, end, SCANNED):
                tokens = at + tl.arange(0, SCANNED)
                found = (tokens >= start) & (tokens < end)
                if DOCUMENTS:
                    other = load_ids(IDS, tokens, count, DOCUMENTS)
                    found = found & (other >= low_id) & (other <= high_id)
                if HAS_POSITIONS:
                    own = load_positions(POSITIONS, tokens, count, offset, HAS_POSITIONS)
                    found = found & (own >= low) & (own <= high)
                first = tl.minimum(first, tl.min(tl.where(found, tokens, end)))
                last = tl.maximum(last, tl.max(tl.where(found, tokens + 1, start)))
            start = first
            end = last
        start = start // BLOCK * BLOCK
    if DOCUMENTS or HAS_POSITIONS or CHUNK or DENSE:
        full_start = end
        full_end = end
        if OF_QUERIES:  # keys come last, since the last tile of keys has a mask anyway
            full_start = start
            full_end = start
    else:
        # Queries beyond the last need no mask: they have no probabilities.
        last = tl.full((), count, tl.int32)
        if not OF_QUERIES:
            last = tl.cdiv(last, BLOCK) * BLOCK
        last = tl.minimum(full_high - offset + 1, last)
        full_start = tl.cdiv(tl.maximum(full_low - offset, 0), BLOCK) * BLOCK
        full_start = tl.minimum(tl.maximum(full_start, start), end)
        full_end = tl.maximum(tl.minimum(last // BLOCK * BLOCK, end), full_start)
    return start, full_start, full_end, end


@triton.jit
def scaled(products, scale, cap, SOFTCAP: tl.constexpr):
    """Returns scores to the base 2 from products of queries and keys."""
    if SOFTCAP:
        bounded = 2.0 * tl.sigmoid(products * (2.0 * scale / cap)) - 1.0  # tanh
        return bounded * (cap * LOG2_E)
    return products * (scale * LOG2_E)


@triton.jit
def with_slope(x, query_position, key_position, slope, SLOPES: tl.constexpr):
    """Returns the scores less the distance times the slope of the head."""
    if SLOPES:
        return x - (slope * LOG2_E) * tl.abs(query_position - key_position).to(x.dtype)
    return x


@triton.jit
def query_words(WORD0, WORD1, rows, sample, batch, count, site0, site1):
    """Returns both words of the key of the queries' dropout, folded."""
    at = rows.to(tl.int64) * batch + sample
    word0 = tl.load(WORD0 + at, mask=rows < count, other=0) + site0
    word1 = tl.load(WORD1 + at, mask=rows < count, other=0) ^ site1
    return folded(word0.to(tl.int32), 17), folded(word1.to(tl.int32), 11)


@triton.jit
def key_numbers(COLUMNS, keys, count, first, head, length, HAS_COLUMNS: tl.constexpr):
    """Returns the folded numbers of the dropout's channels: first + head * length + column."""
    column = keys
    if HAS_COLUMNS:
        column = tl.load(COLUMNS + keys, mask=keys < count, other=0).to(tl.int32)
    row = tl.full((), head, tl.uint32) * tl.full((), length, tl.int32).to(tl.uint32, bitcast=True)
    row += tl.full((), first, tl.int32).to(tl.uint32, bitcast=True)
    return folded(row + column.to(tl.uint32, bitcast=True), 17)


@triton.jit
def kept(word0, number, word1, least):
    """Returns whether dropout keeps the elements of a tile."""
    return hashed(word0 ^ number, word1) >= least
