"""Tables on the device from which a kernel finds many tensors: their addresses, and their chunks.

They are made when they are first needed and copied to the device without a wait. Tensors whose
addresses do not change between steps need no new table.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

CHUNK: Final = 16384
"""Elements of a chunk, which one program of a kernel updates."""

ALIGNMENT: Final = 16
"""Bytes of the longest load or store."""

FORMS: Final = {torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes that a kernel rounds to, in the last column of a table; 0 rounds nothing.

`ALIGNED` is added if all addresses of the tensor are multiples of `ALIGNMENT`.
"""

ALIGNED: Final = 4

_LATEST: Final = 32
"""Tables of addresses that are held at most."""


class Tables(NamedTuple):
    """Two tables on the device.

    Attributes:
        tensors: int64 ``[tensors, 7]``: the addresses of gradient, parameter, both moments and the
            tensor to round into (0 if there is none), the number of elements, and the form.
        chunks: int32 ``[chunks, 2]``: the row of ``tensors``, and which chunk of the tensor it is.
    """

    tensors: Tensor
    chunks: Tensor


class AddressTables:
    """Makes tables of tensors, and holds the latest ones."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, ...], Tensor] = {}
        self._tensors: OrderedDict[tuple[tuple[int, ...], ...], Tensor] = OrderedDict()

    def of(self, lists: Sequence[Sequence[Tensor]], rounded: Sequence[Tensor | None]) -> Tables:
        """Returns tables of tensors without empty ones.

        Args:
            lists: Gradients, parameters and both moments, which are contiguous.
            rounded: The tensor to round each parameter into, or None; empty if there is none.
        """
        into = rounded or [None] * len(lists[0])
        columns = [tuple([tensor.data_ptr() for tensor in tensors]) for tensors in lists]
        columns.append(tuple([0 if tensor is None else tensor.data_ptr() for tensor in into]))
        sizes = tuple([tensor.numel() for tensor in lists[1]])
        forms = [0 if tensor is None else FORMS[tensor.dtype] for tensor in into]
        key = (*columns, sizes, tuple(forms))
        device = lists[1][0].device
        if (found := self._tensors.pop(key, None)) is None:
            found = _moved(_rows(columns, sizes, forms), device)
        self._tensors[key] = found  # the latest
        if len(self._tensors) > _LATEST:
            self._tensors.popitem(last=False)
        if sizes not in self._chunks:
            self._chunks[sizes] = _moved(_chunks(sizes), device)
        return Tables(found, self._chunks[sizes])


def _rows(columns: Sequence[Sequence[int]], sizes: Sequence[int], forms: Sequence[int]) -> Tensor:
    """Returns the table of tensors in host memory."""
    addresses = torch.tensor(columns, dtype=torch.int64)
    aligned = (addresses % ALIGNMENT == 0).all(0)
    form = torch.tensor(forms, dtype=torch.int64) + ALIGNED * aligned
    return torch.cat([addresses, torch.tensor([[*sizes]]), form[None]]).T.contiguous()


def _chunks(sizes: Sequence[int]) -> Tensor:
    """Returns the table of chunks in host memory."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    tensors = torch.arange(len(sizes)).repeat_interleave(counts)
    first = torch.cumsum(counts, 0) - counts
    numbers = torch.arange(len(tensors)) - first[tensors]
    return torch.stack([tensors, numbers], 1).to(torch.int32)


def _moved(table: Tensor, device: torch.device) -> Tensor:
    """Returns a table on the device, from pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
