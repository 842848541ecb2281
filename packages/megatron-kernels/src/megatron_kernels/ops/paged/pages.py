"""Which blocks of a pool hold the keys and values of each sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_kernels.errors import KernelError


@dataclass(frozen=True, eq=False)
class Pages:
    """The blocks of sequences, as in PagedAttention (Kwon et al. 2023, section 4.2).

    Key ``i`` of a sequence is entry ``i % block_size`` of block ``tables[row, i // block_size]``.

    Attributes:
        tables: int32 `[b, max_blocks]`, the blocks of each sequence in order. Entries after the
            last key of a sequence are any block.
        lengths: int32 `[b]`, the number of keys of each sequence, those of its new tokens included.
            0 is a sequence without keys, whose output is zero.
        runs: For each sequence its first block and its length, if its blocks follow each other:
            what the host knows of the tensors. None if it is unknown or they do not. Fused kernels
            then read the pool in place.
    """

    tables: Int[Tensor, "b blocks"]
    lengths: Int[Tensor, " b"]
    runs: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def consecutive(
        cls,
        first_blocks: Sequence[int],
        lengths: Sequence[int],
        block_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> "Pages":
        """Returns the pages of sequences whose blocks follow each other.

        Args:
            first_blocks: The first block of each sequence.
            lengths: The number of keys of each sequence.
            block_size: Keys of a block.
            device: Device of the tensors.
        """
        width = -(-max(lengths, default=0) // block_size)
        first = torch.tensor(first_blocks, dtype=torch.int32)
        used = -(-torch.tensor(lengths, dtype=torch.int32) // block_size)
        steps = torch.arange(width, dtype=torch.int32).minimum(used.clamp(min=1)[:, None] - 1)
        return cls(
            (first[:, None] + steps).to(device),
            torch.tensor(lengths, dtype=torch.int32).to(device),
            tuple(zip(first_blocks, lengths, strict=True)),
        )

    def check(self, sequences: int, blocks: int, block_size: int) -> None:
        """Verifies shapes, and on a CPU that all keys are in blocks of the pool.

        Raises:
            KernelError: They are not.
        """
        shapes = list(self.tables.shape), list(self.lengths.shape)
        if self.tables.shape[0] != sequences or shapes[1] != [sequences]:
            raise KernelError(
                f"paged_attention: block tables {shapes[0]} and lengths {shapes[1]} are not of "
                f"{sequences} sequences"
            )
        if not self._readable or not sequences or self.runs is not None:
            return
        longest = int(self.lengths.max())
        if longest > self.tables.shape[1] * block_size:
            raise KernelError(
                f"paged_attention: {longest} keys do not fit into {self.tables.shape[1]} blocks of "
                f"{block_size} keys; give longer block tables"
            )
        if (
            self.tables.numel()
            and not 0 <= int(self.tables.min()) <= int(self.tables.max()) < blocks
        ):
            raise KernelError(
                f"paged_attention: block tables have blocks {int(self.tables.min())} to "
                f"{int(self.tables.max())}, but the pool has blocks 0 to {blocks - 1}"
            )

    def known_runs(self, block_size: int) -> tuple[tuple[int, int], ...] | None:
        """Returns `runs`, read from the tensors if they are on a CPU."""
        if self.runs is not None or not self._readable:
            return self.runs
        found = []
        for row, length in zip(self.tables.tolist(), self.lengths.tolist(), strict=True):
            used = row[: -(-length // block_size)]
            first = row[0] if row else 0
            if used != list(range(first, first + len(used))):
                return None
            found.append((first, length))
        return tuple(found)

    def gather(self, pool: Float[Tensor, "blocks block_size g d"]) -> Float[Tensor, "t b g d"]:
        """Returns a copy of the keys or values of all sequences.

        It has as many entries as the tables have. Those after the last key of a sequence are of any
        block.
        """
        return pool[self.tables.long()].flatten(1, 2).transpose(0, 1)

    @property
    def _readable(self) -> bool:
        """Whether the host reads the tensors without waiting; an imagined one has no values."""
        on_host = self.tables.device.type == "cpu" and type(self.tables) is Tensor
        return on_host and not torch.compiler.is_compiling()
