"""Groups documents for the tokenizer, and finds the documents that it refuses."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from megatron_data.errors import DataError
from megatron_data.sources.protocol import Chunk, Fault, Item, Row

AT_ONCE = 1 << 20
"""Characters, or bytes of the source, per call of the tokenizer, which bounds the memory. Also the
size above which a document is split, if the tokenizer supports it."""

ItemT = TypeVar("ItemT", Item, Row)
EncodedT = TypeVar("EncodedT")


def batch_items(items_or_faults: Iterator[ItemT | Fault]) -> Iterator[list[ItemT] | Fault]:
    """Groups documents up to about `AT_ONCE` bytes; a fault ends a group, to keep the order."""
    items: list[ItemT] = []
    size = 0
    for item in items_or_faults:
        if isinstance(item, Fault):
            if items:
                yield items
                items, size = [], 0
            yield item
            continue
        items.append(item)
        size += item.size
        if size >= AT_ONCE:
            yield items
            items, size = [], 0
    if items:
        yield items


def encode_or_fault(
    chunk: Chunk, items: list[Item], encode: Callable[[list[Item]], EncodedT]
) -> Iterator[tuple[list[Item], EncodedT | Fault]]:
    """Encodes items in one call, or one by one with faults if the tokenizer refuses some."""
    try:
        yield items, encode(items)
    except DataError as error:
        if len(items) == 1:
            yield items, chunk.fault(items[0], "tokens", str(error))
            return
        for item in items:
            yield from encode_or_fault(chunk, [item], encode)
