"""What tests of the Triton kernels of attention share: small tiles, inputs, documents, masks."""

from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_kernels.inputs import CaseDropout
from megatron_kernels.triton_kernels import attention as forward_kernels
from megatron_kernels.triton_kernels import attention_backward as backward_kernels
from megatron_kernels.triton_kernels.attention_launch import Tiling
from torch import Tensor

F64 = torch.float64
QUERIES, KEYS, BATCH, HEADS = 41, 41, 2, 2


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives all kernels tiles of 16 tokens."""
    torch.manual_seed(7)

    def small(*_: Any) -> Tiling:
        return Tiling(16, 16, 4, 1)

    for module in (forward_kernels, backward_kernels):
        monkeypatch.setattr(module, "tiling", small)


def inputs(
    queries: int = QUERIES, keys: int = KEYS, groups: int = 1, width: int = 16, of_values: int = 16
) -> tuple[Tensor, ...]:
    shapes = (
        (queries, BATCH, HEADS, width),
        (keys, BATCH, groups, width),
        (keys, BATCH, groups, of_values),
    )
    return tuple(torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)


def dropout(queries: int = QUERIES, keys: int = KEYS) -> CaseDropout:
    words = torch.randint(-(2**31), 2**31, (2, queries, BATCH), dtype=torch.int64).int()
    return CaseDropout(words[0], words[1], torch.randint(1000, (BATCH, keys)))


def equal(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def packed(*lengths: tuple[int, ...]) -> Tensor:
    """Returns document ids of rows; a negative length is padding."""
    rows = [
        torch.cat([torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(row)])
        for row in lengths
    ]
    return torch.stack(rows).int()


DOCUMENTS = packed((18, 3, 20), (1, 20, -8, 12))
SHUFFLED = DOCUMENTS[:, torch.randperm(KEYS, generator=torch.Generator().manual_seed(1))]
POSITIONS = torch.stack((torch.arange(KEYS).flip(0), torch.arange(KEYS) * 2)).int()
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=18),
    "narrow window": Mask(window=3),
    "window both ways": Mask(causal=False, window=17),
    "chunks": Mask(chunk=18),
    "chunks both ways": Mask(causal=False, chunk=10),
    "prefix": Mask(prefix=20),
    "prefixes and window": Mask(prefix=torch.tensor([5, 33]), window=20),
    "documents": Mask(DOCUMENTS),
    "documents both ways": Mask(DOCUMENTS, causal=False, window=8),
    "documents in any order": Mask(SHUFFLED, prefix=10),
    "positions": Mask(positions=POSITIONS),
    "positions, window": Mask(DOCUMENTS, positions=POSITIONS, window=9, chunk=30),
    "dense": Mask(dense=Mask(SHUFFLED, window=30).allowed(QUERIES, KEYS)),
    "prepared": Mask(SHUFFLED, window=30).prepare(QUERIES, KEYS),
}
