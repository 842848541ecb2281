"""Sizes of tiles and arguments that the kernels of both passes of attention share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    accumulator,
    has_data_center_memory,
    power_of_two,
)
from megatron_kernels.triton_kernels.rows import store_rows

UNSPECIALIZED: Final = (
    *("s", "t", "batch", "heads", "per_group", "query_ids_b", "key_ids_b", "query_positions_b"),
    *("key_positions_b", "allowed_b", "columns_b", "offset", "window", "chunk", "prefix"),
    *("first", "length", "site0", "site1", "least"),
)
"""Integers whose values kernels are not compiled for."""

_SMALLEST: Final = 16
"""Smallest dim of a product of tiles."""


class Tiling(NamedTuple):
    """Sizes of a kernel's tiles.

    Attributes:
        rows: Tokens that a program owns: queries, or keys for their gradients.
        steps: Tokens of the other kind that it visits at once.
        num_warps: Warps of a program.
        num_stages: Steps that are in flight, whose tiles are in shared memory.
    """

    rows: int
    steps: int
    num_warps: int
    num_stages: int

    def smaller(self) -> "Tiling":
        """Returns sizes that fit into the 99 KiB of GPUs for workstations."""
        return Tiling(min(self.rows, 64), min(self.steps, 32), 4, 1)


FORWARD: Final = {
    (2, 64): Tiling(128, 64, 4, 3),
    (2, 128): Tiling(128, 64, 8, 3),
    (2, 256): Tiling(128, 32, 8, 2),
    (4, 64): Tiling(64, 32, 4, 2),
    (4, 128): Tiling(128, 32, 8, 1),
    (4, 256): Tiling(32, 32, 8, 1),
}
"""By bytes of an element and largest head dimension."""

QUERY_GRADIENT: Final = {
    (2, 64): Tiling(128, 64, 8, 3),
    (2, 128): Tiling(128, 64, 8, 2),
    (2, 256): Tiling(64, 32, 8, 2),
    (4, 64): Tiling(64, 32, 4, 1),
    (4, 128): Tiling(32, 32, 4, 1),
    (4, 256): Tiling(16, 16, 4, 1),
}
KEY_GRADIENT: Final = {
    (2, 64): Tiling(128, 64, 8, 2),
    (2, 128): Tiling(128, 32, 8, 2),  # with 64 steps, sums and scores exceed the registers
    (2, 256): Tiling(32, 64, 8, 1),
    (4, 64): Tiling(64, 32, 8, 1),
    (4, 128): Tiling(32, 32, 8, 1),
    (4, 256): Tiling(16, 16, 4, 1),
}


def tiling(table: dict[tuple[int, int], Tiling], x: Tensor, width: int) -> Tiling:
    """Returns the sizes for a dtype and the wider of the head dimensions of queries and values."""
    size = min(x.element_size(), 4)
    found = next(entry for (of, most), entry in table.items() if of == size and width <= most)
    return found if has_data_center_memory(x.device) else found.smaller()


@dataclass(frozen=True)
class Call:
    """What all kernels of a call of attention get, apart from tiles.

    The lists are those of the operation `attention_forward`.

    Attributes:
        q: Queries `[s, b, n, d]`, channels next to one another in memory.
        k: Keys `[t, b, g, d]`, likewise.
        v: Values `[t, b, g, dv]`, likewise.
        tensors: Documents of queries and keys, positions of queries and keys, prefixes, dense
            mask, slopes, words of dropout (two), columns of dropout; each may be None.
        numbers: Offset of the queries, window, chunk, prefix, whether causal, and of dropout: first
            channel, channels of a head, words of its site (two), least hash that is kept.
        factors: Scale, soft-cap, factor of what dropout keeps.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tensors: Sequence[Tensor | None]
    numbers: Sequence[int]
    factors: Sequence[float]

    def arguments(self) -> tuple[Any, ...]:
        """Returns the arguments between the tensors of a kernel and its own options."""
        s, b, n, _ = self.q.shape
        t, _, groups, _ = self.k.shape
        strides = [x.stride(dim) for x in (self.q, self.k, self.v) for dim in range(3)]
        of_samples = [
            0 if x is None or len(x) == 1 else x.stride(0)
            for x in (*self.tensors[:4], self.tensors[5], self.tensors[9])
        ]
        offset, window, chunk, prefix, _, *dropout = self.numbers
        return (
            *self._present(), s, t, b, n, n // groups, *strides, *of_samples,
            offset, window, chunk, prefix, *dropout, *self.factors,
        )  # fmt: skip

    def _present(self) -> list[Tensor]:
        """Returns the tensors with another one, which is not read, for each that is missing."""
        found = [self.q if x is None else x for x in self.tensors]
        dense = self.tensors[5]
        if dense is not None:
            found[5] = dense.view(torch.uint8)
        return found

    def options(self) -> dict[str, Any]:
        """Returns the constants that kernels are compiled for."""
        ids, _, positions, _, prefixes, dense, slopes, word0, _, columns = self.tensors
        _, window, chunk, prefix, causal, *_ = self.numbers
        width, of_values = self.q.shape[-1], self.v.shape[-1]
        has_prefix = 0 if not causal else 2 if prefixes is not None else int(prefix > 0)
        return {
            "D": width,
            "DV": of_values,
            "BLOCK_D": max(_SMALLEST, power_of_two(width)),
            "BLOCK_DV": max(_SMALLEST, power_of_two(of_values)),
            "CAUSAL": bool(causal),
            "WINDOW": window > 0,
            "CHUNK": chunk > 0,
            "PREFIX": has_prefix,
            "DOCUMENTS": ids is not None,
            "HAS_POSITIONS": positions is not None,
            "DENSE": dense is not None,
            "SLOPES": slopes is not None,
            "SOFTCAP": self.factors[1] > 0,
            "DROPS": word0 is not None,
            "HAS_COLUMNS": columns is not None,
            "ACC": accumulator(self.q.dtype),
            "OPERAND": _operand(self.q.dtype),
        }


def _operand(dtype: torch.dtype) -> Any:
    """Returns the dtype of the operands of products. The interpreter has none of bfloat16."""
    if dtype == torch.bfloat16 and isinstance(store_rows, triton.JITFunction):
        return tl.bfloat16
    return {torch.float64: tl.float64, torch.float16: tl.float16}.get(dtype, tl.float32)
