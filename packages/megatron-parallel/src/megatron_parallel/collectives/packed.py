"""Tensors that one rank has and all get, whatever their number, shapes and dtypes; and texts.

They go as two messages: 16 bytes that say how long the second one is, then a description of the
tensors and their bytes. So receivers know nothing beforehand and yet make room for exactly what
comes; a backend that is sent another number of bytes than it expects stops, or leaves zeros.

Nothing is pickled, here or anywhere between ranks: what is no tensor travels as JSON.
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

_ALIGNED: Final = 16  # bytes, where a tensor begins


def broadcast_tensors(
    tensors: Mapping[str, Shaped[Tensor, "..."]],
    axis: Axis,
    source: int = 0,
    *,
    device: torch.device | str = "cpu",
    purpose: str = "",
) -> dict[str, Shaped[Tensor, "..."]]:
    """Returns the tensors of one member of an axis on all of them.

    Args:
        tensors: By name. Only those of the source count; the others' are not looked at.
        axis: Who takes part. Over an axis of one rank nothing is sent.
        source: Index of the source on the axis.
        device: Where they are to be; that which the backend sends from.
        purpose: What they are, for `Mesh.counting` and for errors.

    Returns:
        The same names in the same order, with equal bits, on `device`. They share memory among
        themselves; on the source they are its own where those are on `device`.
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
    """Returns the text of every member of an axis, in their order.

    Args:
        text: This rank's.
        axis: Who takes part. Over an axis of one rank nothing is sent.
        device: That which the backend sends from.
        purpose: What the texts are, for `Mesh.counting` and for errors.
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
    if not text:  # which torch.frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _aligned(*parts: Tensor) -> Iterator[Tensor]:
    """Returns the parts, each followed by zeros up to where the next may begin."""
    for part in parts:
        yield part
        yield part.new_zeros(-len(part) % _ALIGNED)


def _unpacked(message: Tensor, described: int) -> dict[str, Tensor]:
    found, at = {}, _up(described)
    for name, dtype, shape in json.loads(bytes(message[:described].tolist())):
        kind: torch.dtype = getattr(torch, dtype)
        length = prod(shape) * kind.itemsize
        found[name] = message[at : at + length].view(kind).view(shape)
        at += _up(length)
    return found


def _up(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED
