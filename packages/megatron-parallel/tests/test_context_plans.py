"""Plans of a ring by hand: tiles of one token, tiles of documents, and what the host reads."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import megatron_parallel.context_parallel.blocks as blocks
import pytest
import torch
from megatron_parallel.context_parallel import ContextSplit, SequenceMask, plan_ring
from megatron_parallel.imagined import imagined_device

IDS = torch.tensor([[0] * 10 + [1] * 6])
Planned = list[tuple[tuple[int, int], tuple[int, int], bool]]


def planned(mask: SequenceMask, split: ContextSplit, rank: int, source: int) -> Planned:
    """Returns rows, columns and whether all pairs are allowed, of the blocks of one source."""
    return [
        ((b.rows.start, b.rows.stop), (b.columns.start, b.columns.stop), b.mask.all_allowed)
        for b in plan_ring(mask, split, rank).blocks[source]
    ]


FIRST, SECOND, BOTH = (0, 1), (1, 2), (0, 2)
OWN, LATER = (FIRST, FIRST, True), (SECOND, SECOND, True)


@pytest.mark.parametrize(
    ("mask", "rank", "source", "expected"),
    [
        (SequenceMask(), 0, 1, [(SECOND, BOTH, True)]),
        (SequenceMask(), 1, 0, [(BOTH, FIRST, True)]),
        (SequenceMask(causal=False), 0, 1, [(BOTH, BOTH, True)]),
        (SequenceMask(window=1), 0, 0, [OWN, LATER]),
        (SequenceMask(window=1), 0, 1, []),
        (SequenceMask(window=2), 0, 1, [LATER]),
        (SequenceMask(window=3), 0, 1, [(SECOND, BOTH, True)]),
        (SequenceMask(window=2, causal=False), 0, 1, [OWN, LATER]),
        (SequenceMask(window=3, causal=False), 0, 1, [(BOTH, BOTH, True)]),
        (SequenceMask(prefix=1), 0, 1, [(SECOND, BOTH, True)]),
        (SequenceMask(prefix=2), 0, 1, [(FIRST, FIRST, False), (SECOND, BOTH, True)]),
        (SequenceMask(chunk=2), 0, 1, [LATER]),
        (SequenceMask(chunk=2, causal=False), 0, 1, [OWN, LATER]),
        (SequenceMask(chunk=2, causal=False), 0, 0, [OWN, LATER]),
        (SequenceMask(torch.tensor([[0, 0, 1, 1]])), 0, 1, [LATER]),
        (SequenceMask(torch.tensor([[0, 0, 1, 1]])), 1, 0, [OWN]),
        (SequenceMask(torch.tensor([[0, 0, -1, -1]])), 1, 0, [OWN]),
        (SequenceMask(torch.tensor([[0, 0, -1, -1]])), 0, 1, []),
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_tiles_of_one_token_are_those_of_the_mask(
    mask: SequenceMask, rank: int, source: int, expected: Planned, ranges: bool
) -> None:
    """Rank 0 of 2 has the tokens 0 and 3; rank 1 has 1 and 2."""
    split = ContextSplit.zigzag(4, 2)
    split = split if ranges else ContextSplit(split.indices)
    assert planned(mask, split, rank, source) == expected


@pytest.mark.parametrize(
    ("ids", "rank", "rows", "columns"),
    [
        ([0, 1, 1, 1, 1, 1, 1, 1], 1, (0, 4), (0, 2)),  # of keys, the token 0 is another document
        ([0, 0, 1, 1, 1, 1, 0, 1], 0, (2, 4), (0, 4)),  # of queries, the token 6 is one
    ],
)
def test_a_tile_of_two_documents_needs_a_mask(
    ids: list[int], rank: int, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Rank 0 of 2 has the tokens 0, 1, 6 and 7; rank 1 has 2 to 5."""
    found = planned(SequenceMask(torch.tensor([ids])), ContextSplit.zigzag(8, 2), rank, 1 - rank)
    assert found == [(rows, columns, False)]


@pytest.mark.parametrize(
    ("length", "mask", "tile"),
    [
        (1024, SequenceMask(window=1), 128),
        (1024, SequenceMask(chunk=128), 128),
        (1028, SequenceMask(torch.arange(1028)[None] // 257), 257),  # no four tiles are equal
    ],
    ids=["window", "chunk", "odd"],
)
def test_other_rules_than_causal_have_small_tiles(
    length: int, mask: SequenceMask, tile: int
) -> None:
    found = planned(mask, ContextSplit.zigzag(length, 2), 0, 0)
    assert {stop - start for (start, stop), _, _ in found} == {tile}


HOST = ContextSplit.zigzag(16, 2).with_documents(IDS)
POSITIONS = torch.arange(16)[None]


@pytest.mark.parametrize(
    ("mask", "split", "reads"),
    [
        (SequenceMask(), ContextSplit.zigzag(16, 2), 0),
        (SequenceMask(window=3), ContextSplit.zigzag(16, 2), 0),
        (SequenceMask(prefix=3), ContextSplit.zigzag(16, 2), 0),
        (SequenceMask(), ContextSplit(HOST.indices), 1),
        (SequenceMask(IDS), ContextSplit.zigzag(16, 2), 1),
        (SequenceMask(positions=POSITIONS), ContextSplit.zigzag(16, 2), 1),
        (SequenceMask(prefix=torch.tensor([3])), ContextSplit.zigzag(16, 2), 1),
        (SequenceMask(IDS), HOST, 0),
        (SequenceMask(), HOST, 0),
        (SequenceMask(positions=POSITIONS), HOST, 1),
        (SequenceMask(prefix=torch.tensor([3])), HOST, 1),
        (SequenceMask(IDS), ContextSplit.per_document(IDS, 2), 0),
    ],
)
def test_the_host_reads_what_it_does_not_know(
    mask: SequenceMask, split: ContextSplit, reads: int
) -> None:
    with patch.object(blocks, "read_integers", wraps=blocks.read_integers) as read:
        plan_ring(mask, split, 1)
    assert read.call_count == reads


def test_every_tile_is_computed_where_no_documents_exist() -> None:
    with imagined_device("cpu"):
        ids = torch.zeros(1, 16, dtype=torch.int32)
        split = ContextSplit.zigzag(16, 2)
        for source in range(2):
            assert planned(SequenceMask(ids), split, 0, source) == [((0, 8), (0, 8), False)]


def test_values_with_tensors_are_compared_by_identity() -> None:
    """Tensors have no single truth value."""
    mask, places = SequenceMask(IDS), torch.arange(16)[None]
    plan = plan_ring(mask, HOST, 0)
    block = plan.blocks[0][0]
    values: list[Any] = [mask, mask.block(places, places), HOST, HOST.host, plan, block]
    for value in values:
        assert value == value and replace(value) != value


def test_documents_on_a_device_stay_there() -> None:
    split = ContextSplit.zigzag(16, 2)
    assert split.with_documents(IDS).host is not None
    assert split.with_documents(IDS.to("meta")).host is None
    assert ContextSplit.zigzag(16, 2, "meta").with_documents(IDS).host is None
    assert split.to("cpu").indices.device.type == "cpu"
