"""Rows of a pool have each token of a global batch once, with its fields."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout
from megatron_train.document_pool import DocumentPool, Fields
from megatron_train.tasks.task import MicroBatch

LENGTH, PADDING = 16, -1
DOCUMENTS = {0: [5, 11], 1: [16], 2: [1, 2, 3, 10], 3: [7, 4]}  # the last sample ends with padding


def read(numbers: Sequence[int]) -> Fields:
    """Returns samples with the tokens 100 * number of the sample + index."""
    rows = []
    for number in numbers:
        ids = [i for i, length in enumerate(DOCUMENTS[number]) for _ in range(length)]
        rows.append(ids + [PADDING] * (LENGTH - len(ids)))
    ids = torch.tensor(rows, dtype=torch.int32)
    tokens = 100 * torch.tensor(numbers)[:, None] + torch.arange(LENGTH)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (ids >= 0).float(),
        "positions": torch.arange(LENGTH, dtype=torch.int32).expand(len(numbers), -1),
        "document_ids": ids,
        "sample_ids": torch.tensor(numbers),
    }


def test_each_token_of_a_batch_is_in_one_row_with_its_fields() -> None:
    mesh = Mesh(ParallelLayout(dp=1, hybrid_cp=True), 0)
    lines: list[str] = []
    pool = DocumentPool(mesh, max_tokens_per_rank=20, log=lines.append)
    rows = pool.rows(read, range(4))
    seen = []
    for row in rows:
        fields = row.fields
        length = fields["tokens"].shape[1]
        valid = fields["document_ids"] >= 0
        assert length <= 20 and length % 2 == 0
        assert torch.equal(valid, fields["indices_in_sample"] >= 0)
        assert not fields["loss_mask"][~valid].any()
        expected = 100 * fields["sample_ids"] + fields["indices_in_sample"]
        for name, values in (("tokens", expected), ("labels", expected + 1)):
            assert torch.equal(fields[name][valid], values[valid])
        assert torch.equal(fields["positions"][valid], fields["indices_in_sample"][valid].int())
        seen += expected[valid].tolist()
        assert row.context_split.indices.tolist() == [[list(range(length))]]
    whole = read(range(4))
    assert sorted(seen) == sorted(whole["tokens"][whole["document_ids"] >= 0].tolist())
    assert sum(row.samples for row in rows) == 4
    assert sum(row.tokens for row in rows) == 4 * LENGTH
    pool.rows(read, range(4))
    assert len(lines) == 1 and lines[0].startswith("first batch: documents: 9 unsplit; micro-")


def test_documents_of_a_row_have_different_ids() -> None:
    mesh = Mesh(ParallelLayout(dp=1, hybrid_cp=True), 0)
    (row,) = DocumentPool(mesh, max_tokens_per_rank=64).rows(read, [0, 2])
    ids = row.fields["document_ids"][0]
    runs = [(int(n), int(count)) for n, count in zip(*ids.unique(return_counts=True), strict=True)]
    assert [number for number, _ in runs] == list(range(6))
    assert sorted(count for _, count in runs) == sorted(DOCUMENTS[0] + DOCUMENTS[2])


def test_a_batch_of_padding_is_one_empty_row() -> None:
    def nothing(numbers: Sequence[int]) -> Fields:
        batch = dict(read(numbers))
        return {**batch, "document_ids": torch.full_like(batch["document_ids"], PADDING)}

    (row,) = DocumentPool(
        Mesh(ParallelLayout(dp=1, hybrid_cp=True), 0), max_tokens_per_rank=8
    ).rows(nothing, [1])
    assert row.fields["document_ids"].tolist() == [[PADDING, PADDING]]
    assert (row.samples, row.tokens) == (1, LENGTH)


def test_axes_of_positions_stay_together() -> None:
    def axes(numbers: Sequence[int]) -> Fields:
        batch = dict(read(numbers))
        return {**batch, "positions": batch["positions"][..., None] * torch.tensor([1, 10, 100])}

    mesh = Mesh(ParallelLayout(dp=1, hybrid_cp=True), 0)
    (row,) = DocumentPool(mesh, max_tokens_per_rank=64).rows(axes, [2, 3])
    indices = row.fields["indices_in_sample"].clamp(0)
    assert row.fields["positions"].shape == (1, *indices.shape[1:], 3)
    for axis, scale in enumerate((1, 10, 100)):
        assert torch.equal(row.fields["positions"][..., axis].long(), indices * scale)


Row = tuple[MicroBatch, ...]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Row, list[int]]]]:
    """Returns a function that runs a pool on ranks that are threads; gives rows and reads."""

    def start(size: int, numbers: Sequence[int], **options: Any) -> list[tuple[Row, list[int]]]:
        ready, parts = threading.Barrier(size), dict[int, torch.Tensor]()

        def exchange(
            tensor: torch.Tensor, axis: Any, op: str = "sum", *, purpose: str
        ) -> torch.Tensor:
            parts[axis.index] = tensor
            ready.wait(60)
            every = torch.stack([parts[index] for index in range(size)])
            ready.wait(60)
            return every.amax(0) if op == "max" else every.sum(0)

        def run(rank: int) -> tuple[Row, list[int]]:
            reads: list[int] = []

            def reading(numbers: Sequence[int]) -> Fields:
                reads.extend(numbers)
                return read(numbers)

            mesh = Mesh(ParallelLayout(dp=size, hybrid_cp=True), rank)
            return tuple(DocumentPool(mesh, **options).rows(reading, numbers)), reads

        monkeypatch.setattr("megatron_train.document_pool.all_reduce", exchange)
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(run, range(size)))

    return start


@pytest.mark.parametrize(
    ("numbers", "counted"), [([0, 1, 2, 3], [2, 2]), ([3, 0, 2], [2, 1]), ([2], [1, 0])]
)
def test_ranks_of_a_pool_have_each_token_of_a_batch_once(
    on_ranks: Callable[..., list[tuple[Row, list[int]]]],
    numbers: list[int],
    counted: list[int],
) -> None:
    found = on_ranks(2, numbers, max_tokens_per_rank=8)
    rows = [rows for rows, _ in found]
    assert len(rows[0]) == len(rows[1])
    assert [sum(row.samples for row in own) for own in rows] == counted
    assert [sum(row.tokens for row in own) for own in rows] == [n * LENGTH for n in counted]
    seen = []
    for rank, own in enumerate(rows):
        for row in own:
            fields, split = row.fields, row.context_split
            index = rank if split.ranks == 2 else 0
            part = {name: split.take(values, index) for name, values in fields.items()}
            valid = part["document_ids"] >= 0
            assert split.local_length <= 8 and split.local_length % 2 == 0
            assert torch.equal(valid, part["indices_in_sample"] >= 0)
            expected = 100 * part["sample_ids"] + part["indices_in_sample"]
            assert torch.equal(part["tokens"][valid], expected[valid])
            seen += expected[valid].tolist()
    whole = read(numbers)
    assert sorted(seen) == sorted(whole["tokens"][whole["document_ids"] >= 0].tolist())
    for _, reads in found:
        assert len(reads) == len(set(reads)), "each sample once"


def test_a_pool_reads_only_the_samples_of_its_documents(
    on_ranks: Callable[..., list[tuple[Row, list[int]]]],
) -> None:
    """Two samples of one document each: a rank with room for one reads its own."""
    found = on_ranks(2, [1, 1], max_tokens_per_rank=16)
    for (row,), reads in found:
        assert reads == [1]
        assert row.context_split.ranks == 1 and row.samples == 1
        assert row.fields["tokens"].tolist() == [[*range(100, 116)]]
