"""What the kernels of the scan of Mamba-2 share: steps, decays inside a chunk, sizes of tiles.

A chunk is a tile of tokens. `log` is the sum of the logarithms of a head's decays from the start of
the chunk to a token, both included, in float32. Only differences of it that are not positive are
exponentiated, and tokens of several documents are divided by masks, never by infinite logarithms.

Documents come as one integer for each token: twice the number of its document, and one for padding.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    accumulator,
    exact,
    has_data_center_memory,
    power_of_two,
    two_floats,
)
from megatron_kernels.triton_kernels.rows import load_rows

UNSPECIALIZED: Final = ("s", "batch", "heads", "per_group")
"""Integers whose values kernels are not compiled for."""

_SMALLEST: Final = 16
"""Smallest dim of a product of tiles."""

_LARGEST: Final = float(torch.finfo(torch.float32).max)


class Tiling(NamedTuple):
    """Sizes that the kernels of a scan have besides the tokens of a chunk.

    Attributes:
        width: Channels of values and of the state that one program of the states holds.
        warps: Warps of a program that passes states, computes outputs, and computes gradients.
        stages: Chunks or heads that these have in flight, whose tiles are in shared memory.
    """

    width: int
    warps: tuple[int, int, int]
    stages: tuple[int, int, int]


TILINGS: Final = {
    (2, 64): Tiling(64, (4, 4, 8), (3, 2, 2)),
    (2, 32): Tiling(64, (4, 4, 8), (3, 1, 1)),
    (4, 32): Tiling(32, (4, 8, 8), (2, 1, 1)),
}
"""By bytes of an operand and tokens of a chunk."""


class Operands(NamedTuple):
    """How products of tiles are computed.

    Attributes:
        kernel: Dtype of their operands in a kernel.
        precision: Precision of operands in float32.
        states: Dtype in which the states at the starts of chunks are stored, which are operands.
    """

    kernel: Any
    precision: str
    states: torch.dtype


def operands(dtype: torch.dtype) -> Operands:
    """Returns how inputs of a dtype are multiplied.

    Values of float16 are multiplied as tf32, which has their mantissa and the range of float32: a
    state, or a product of `B` and `C`, may exceed 65,504. float32 takes three products of tf32,
    about 21 bits. The interpreter has no bfloat16.
    """
    if dtype == torch.bfloat16:
        compiles = isinstance(load_rows, triton.JITFunction)
        return Operands(tl.bfloat16 if compiles else tl.float32, "tf32", dtype)
    if dtype == torch.float64:
        return Operands(tl.float64, "ieee", dtype)
    return Operands(tl.float32, "tf32" if dtype == torch.float16 else "tf32x3", torch.float32)


def tiling(x: Tensor, chunk: int) -> Tiling:
    """Returns the sizes for values and the tokens of a chunk."""
    found = TILINGS[2 if x.dtype == torch.bfloat16 else 4, chunk]
    return found if has_data_center_memory(x.device) else found._replace(stages=(2, 1, 1))


def block(channels: int) -> int:
    """Returns the dim of a tile that holds all channels."""
    return max(_SMALLEST, power_of_two(channels))


def token_options(x: Tensor, documents: Tensor | None, chunk: int) -> dict[str, Any]:
    """Returns the constants that all kernels of a scan are compiled for."""
    return {
        "HAS_DOCUMENTS": documents is not None,
        "ACC": accumulator(x.dtype),
        "TOKENS": chunk,
    }


def tile_options(x: Tensor, channels: int) -> dict[str, Any]:
    """Returns further constants of those kernels that multiply tiles."""
    product = operands(x.dtype)
    return {
        "D": x.shape[-1],
        "K": channels,
        "OPERAND": product.kernel,
        "PRECISION": product.precision,
    }


def group_options(x: Tensor, channels: int, members: int) -> dict[str, Any]:
    """Returns further constants of those kernels whose programs have heads of a group."""
    return {"BLOCK_D": block(x.shape[-1]), "BLOCK_K": block(channels), "MEMBERS": members}


def limit_numbers(limits: Sequence[float]) -> list[float]:
    """Returns both limits of steps as `two_floats`; any numbers if there are none."""
    return [part for each in limits or (0.0, 0.0) for part in two_floats(min(each, _LARGEST))]


def splits_of_heads(device: torch.device, programs: int, per_group: int) -> int:
    """Returns over how many programs the heads of a group are divided evenly.

    A program computes its heads one after another, so that it reads and multiplies the `B` and `C`
    of the group once. Four programs for each multiprocessor keep a GPU busy.

    Args:
        device: Device of the kernel.
        programs: Programs if one has all heads of a group.
        per_group: Heads of a group.
    """
    wanted = 6
    if device.type == "cuda":
        wanted = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    enough = min(per_group, -(-wanted // programs))
    return next(each for each in range(enough, per_group + 1) if per_group % each == 0)


@triton.jit
def heads_of_program(batch, heads, per_group, MEMBERS: tl.constexpr):
    """Returns what a program computes: first head, group, number of chunk and sample, sample."""
    parts = heads // MEMBERS
    first = tl.program_id(0) % parts * MEMBERS
    line = tl.program_id(0) // parts
    return first, (first // per_group).to(tl.int64), line, (line % batch).to(tl.int64)


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)), or x above 20 as torch does; exact for small results too."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    # The error of the sum cancels in the quotient (Kahan's log1p).
    rest = tl.where(whole == 1.0, small, tl.log(whole) * (small / (whole - 1.0)))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + rest)


@triton.jit
def limited(
    step, low, low_rest, high, high_rest, LIMITED: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Returns steps between two limits, which are sums of two numbers each; NaN stays."""
    if LIMITED:
        least, most = exact(low, low_rest, ACC), exact(high, high_rest, ACC)
        step = tl.where(step < least, least, step)
        step = tl.where(step > most, most, step)
    return step


@triton.jit
def load_documents(DOCUMENTS, sample, tokens, s, HAS_DOCUMENTS: tl.constexpr):
    """Returns the documents of tokens, and which tokens exist and are no padding.

    Without documents, the first are any numbers; so is that of `document_before`.
    """
    inside = tokens < s
    if HAS_DOCUMENTS:
        code = tl.load(DOCUMENTS + sample * s + tokens, mask=inside, other=1).to(tl.int32)
        return code // 2, inside & (code % 2 == 0)
    return tokens, inside


@triton.jit
def document_before(DOCUMENTS, sample, start, s, HAS_DOCUMENTS: tl.constexpr):
    """Returns the document of the token before a chunk; an initial state belongs to the first."""
    if HAS_DOCUMENTS:
        at = DOCUMENTS + sample * s + start - 1
        return tl.load(at, mask=start > 0, other=0).to(tl.int32) // 2
    return start


@triton.jit
def end_of_chunk(log, document, tokens, last):
    """Returns the logarithm and the document of the last token; documents are in order."""
    total = tl.sum(tl.where(tokens == last, log, 0.0), axis=0)
    return total, tl.max(tl.where(tokens <= last, document, 0), axis=0)


@triton.jit
def decay_from_start(log, document, before, HAS_DOCUMENTS: tl.constexpr):
    """Returns what is left of the state before a chunk; nothing in other documents."""
    decay = tl.exp(log)
    return tl.where(document == before, decay, 0.0) if HAS_DOCUMENTS else decay


@triton.jit
def decay_to_end(log, document, total, final, HAS_DOCUMENTS: tl.constexpr):
    """Returns what is left of each token after the last one of its chunk."""
    decay = tl.exp(total - log)
    return tl.where(document == final, decay, 0.0) if HAS_DOCUMENTS else decay


@triton.jit
def decay_between(
    earlier, later, log, log_later, document, document_later, s, HAS_DOCUMENTS: tl.constexpr
):  # fmt: skip
    """Returns what is left of tokens at later ones; zero for those that are before.

    Tokens, logarithms and documents of both have shapes that broadcast to a tile.
    """
    connected = (earlier <= later) & (later < s)
    if HAS_DOCUMENTS:
        connected = connected & (document == document_later)
    return tl.exp(tl.where(connected, log_later - log, float("-inf")))
