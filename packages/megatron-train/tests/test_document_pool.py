"""Rows of a pool have each token of a global batch once, with its fields."""

from collections.abc import Sequence

import torch
from megatron_parallel import Mesh, ParallelLayout
from megatron_train.document_pool import DocumentPool, Fields

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
