"""Broadcast of tensors of any number, shapes and dtypes, and all-gather of texts.

A broadcast is two messages: 16 bytes with the sizes of the second one, then a description of the
tensors and their bytes. Receivers need to know nothing in advance and still allocate the exact
size; a backend that receives another number of bytes than expected fails or leaves zeros.

Ranks never exchange pickles: everything that is not a tensor is sent as JSON.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Final

import torch
from jaxtyping import Shaped
from torch import Tensor

from megatron_parallel.collectives.operations import all_gather, broadcast
from megatron_parallel.mesh.axes import Axis

_ALIGNED: Final = 16  # bytes, alignment of each tensor


def broadcast_tensors(
    tensors: Mapping[str, Shaped[Tensor, "..."]],
    axis: Axis,
    source: int = 0,
    *,
    device: torch.device | str = "cpu",
    purpose: str = "",
) -> dict[str, Shaped[Tensor, "..."]]:
    """Sends the tensors of one rank to all ranks of an axis.

    Args:
        tensors: Tensors by name. Ignored on all ranks except the source.
        axis: Axis of the broadcast. If its size is 1, nothing is sent.
        source: Index of the source on the axis.
        device: Device of the result, from which the backend sends.
        purpose: Description of the tensors for `Mesh.counting` and for errors.

    Returns:
        The same names in the same order with bitwise equal tensors on `device`. The tensors share
        memory with one another. On the source, tensors that are already on `device` are returned
        themselves.
    """
    if axis.size == 1 or axis.index == source:
        found = {name: tensor.to(device) for name, tensor in tensors.items()}
    if axis.size == 1:
        return found
    sizes = torch.zeros(2, dtype=torch.int64, device=device)
    message = torch.empty(0, dtype=torch.uint8, device=device)
    if axis.index == source:
        text = json.dumps([[n, str(t.dtype)[6:], list(t.shape)] for n, t in found.items()]).encode()
        message = torch.cat([*_aligned(_tensor_of(text, device), *map(_bytes, found.values()))])
        sizes = torch.tensor([len(text), len(message)], device=device)
    broadcast(sizes, axis, source, purpose=f"sizes of {purpose}" if purpose else "sizes")
    described, length = sizes.tolist()
    if axis.index != source:
        message = torch.empty(length, dtype=torch.uint8, device=device)
    broadcast(message, axis, source, purpose=purpose)
    return found if axis.index == source else _unpacked(message, described)


def all_gather_texts(
    text: str, axis: Axis, *, device: torch.device | str = "cpu", purpose: str = ""
) -> list[str]:
    """Returns the texts of all ranks of an axis, in its order.

    Args:
        text: Text of this rank.
        axis: Axis of the all-gather. If its size is 1, nothing is sent.
        device: Device from which the backend sends.
        purpose: Description of the texts for `Mesh.counting` and for errors.
    """
    if axis.size == 1:
        return [text]
    own = _tensor_of(text.encode(), device)
    size = torch.tensor([len(own)], device=device)
    sizes = all_gather(size, axis, purpose=f"sizes of {purpose}" if purpose else "sizes").tolist()
    padded = torch.cat([own, own.new_zeros(max(sizes) - len(own))])
    texts = all_gather(padded, axis, purpose=purpose).view(axis.size, -1)
    pairs = zip(texts, sizes, strict=True)
    return [bytes(one[:length].tolist()).decode() for one, length in pairs]


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def _tensor_of(text: bytes, device: torch.device | str) -> Tensor:
    if not text:  # torch.frombuffer does not accept an empty buffer
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _aligned(*parts: Tensor) -> Iterator[Tensor]:
    """Yields the parts, each followed by zeros up to the alignment of the next."""
    for part in parts:
        yield part
        yield part.new_zeros(-len(part) % _ALIGNED)


def _unpacked(message: Tensor, described: int) -> dict[str, Tensor]:
    found, offset = {}, _align(described)
    for name, dtype, shape in json.loads(bytes(message[:described].tolist())):
        kind: torch.dtype = getattr(torch, dtype)
        length = prod(shape) * kind.itemsize
        found[name] = message[offset : offset + length].view(kind).view(shape)
        offset += _align(length)
    return found


def _align(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED
