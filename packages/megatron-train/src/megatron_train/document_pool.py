"""Rows of documents of a global batch for a pool of ranks (--hybrid-context-parallel).

Packed documents that do not attend to each other may be split over different numbers of ranks. The
data- and context-parallel ranks form a pool. For each global batch they compute the same plan of
which ranks process which documents (`megatron_parallel.context_parallel.plan_pool`):

1. Each rank reads its share of the samples to find where documents begin and end.
2. Two small all-reduces distribute the lengths of all documents.
3. All ranks compute the same plan, and each reads the samples that its rows need.

A row is a micro-batch of one sequence: tokens of several documents, which may come from several
samples, followed by padding to equal slices for its ranks. These fields give the origin of each
token, for masks and dropout:

- `document_ids` `[1, s]`: number of the document in the row; -1 for padding.
- `sample_ids` `[1, s]`: number of the sample.
- `indices_in_sample` `[1, s]`: index of the token in the sample; -1 for padding.

The row's `context_split` has the indices that each of its ranks holds. The numbers of samples and
tokens of all micro-batches on all ranks of the pool add up to those of the global batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from megatron_parallel import Mesh, all_reduce, to_device
from megatron_parallel.context_parallel import ContextSplit, PoolPlan, PoolRow, plan_pool
from torch import Tensor

from megatron_train.tasks.task import MicroBatch

Fields = Mapping[str, Tensor]
Read = Callable[[Sequence[int]], Fields]
"""Reads samples by number; returns fields of shape `[b, s, ...]` and `[b]`."""

_BY_TOKEN: Final = ("tokens", "labels", "loss_mask", "positions")


class DocumentPool:
    """Builds this rank's micro-batches of a global batch.

    All ranks of the pool must request the same global batches in the same order.

    Args:
        mesh: Mesh of the run.
        max_tokens_per_rank: Maximum number of tokens on a rank at a time.
        multiple: The length of each rank's slice of a row is a multiple of this number.
        tokens_per_pair: Cost of attention for a pair of query and key, in units of the other costs
            of one token.
        log: Called with one line about the plan of the first global batch.
    """

    def __init__(
        self,
        mesh: Mesh,
        max_tokens_per_rank: int,
        *,
        multiple: int = 2,
        tokens_per_pair: float = 0.0,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._axis = mesh.axis("dp_cp")
        self._device = mesh.device
        self._max_tokens_per_rank = max_tokens_per_rank
        self._multiple = multiple
        self._tokens_per_pair = tokens_per_pair
        self._log = log

    def rows(self, read: Read, numbers: Sequence[int]) -> list[MicroBatch]:
        """Returns this rank's micro-batches of the global batch of samples ``numbers``.

        All ranks get the same number of micro-batches. Their lengths differ, and some may consist
        of padding.

        Raises:
            LayoutError: A document does not fit into the pool.
            CollectiveError: A rank did not take part within the mesh's time-out.
        """
        samples = _Samples(read, numbers)
        ends = self._document_ends(samples, numbers)
        plan = self._plan([stop - start for _, start, stop in ends])
        first_sample = self._axis.index % len(numbers)  # a sample that this rank reads anyway
        length = samples[first_sample]["tokens"].shape[1]
        share = len(range(self._axis.index, len(numbers), self._axis.size))
        rows: list[MicroBatch] = []
        for row in plan.rows_of(self._axis.index):
            documents = () if row is None else row.documents
            parts = [samples.part(*ends[number]) for number in documents]
            fields = self._filled(parts or [samples.part(first_sample, 0, 0)], row)
            ranks = 1 if row is None else len(row.ranks)
            split = ContextSplit.per_document(fields["document_ids"], ranks)
            own_samples = (
                0 if rows else share
            )  # all samples of this rank are counted with its first row
            rows.append(MicroBatch(fields, own_samples, own_samples * length, split))
        return rows

    def _plan(self, lengths: Sequence[int]) -> PoolPlan:
        plan = plan_pool(
            lengths,
            self._axis.size,
            self._max_tokens_per_rank,
            multiple=self._multiple,
            tokens_per_pair=self._tokens_per_pair,
        )
        if self._log is not None:
            self._log(f"first batch: {plan}")
            self._log = None
        return plan

    def _document_ends(
        self, samples: "_Samples", numbers: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Returns index of sample, start and stop of each document of the batch."""
        axis = self._axis
        own = {i: _runs(samples[i]) for i in range(axis.index, len(numbers), axis.size)}
        widest = torch.full((1,), max(map(len, own.values()), default=0), device=self._device)
        width = int(all_reduce(widest, axis, op="max", purpose="numbers of documents"))
        table = torch.zeros((len(numbers), width, 2), dtype=torch.int64)
        for i, runs in own.items():
            table[i, : len(runs)] = runs
        table = to_device(table, self._device)
        table = all_reduce(table, axis, purpose="ends of documents").cpu()
        return [
            (i, start, stop)
            for i, ends in enumerate(table.tolist())
            for start, stop in ends
            if stop > start
        ]

    def _filled(self, parts: Sequence[dict[str, Tensor]], row: PoolRow | None) -> dict[str, Tensor]:
        """Returns the concatenated documents of a row, padded to its length."""
        length = self._multiple if row is None else row.padded_length
        for number, part in enumerate(parts):
            part["document_ids"] = torch.full_like(part["document_ids"], number)
        fields = {}
        for name in parts[0]:
            whole = torch.cat([part[name] for part in parts], 1)
            value = -1 if name in ("document_ids", "indices_in_sample") else 0
            after = (0, 0) * (whole.ndim - 2) + (0, length - whole.shape[1])
            fields[name] = torch.nn.functional.pad(whole, after, value=value)
        return fields


class _Samples:
    """Samples of a global batch. Each is read on first access."""

    def __init__(self, read: Read, numbers: Sequence[int]) -> None:
        self._read = read
        self._numbers = numbers
        self._found: dict[int, Fields] = {}

    def __getitem__(self, index: int) -> Fields:
        if index not in self._found:
            self._found[index] = self._read([self._numbers[index]])
        return self._found[index]

    def part(self, index: int, start: int, stop: int) -> dict[str, Tensor]:
        """Returns the fields of a document, and the sample and indices that it comes from."""
        sample = self[index]
        part = {name: sample[name][:, start:stop] for name in (*_BY_TOKEN, "document_ids")}
        part["indices_in_sample"] = torch.arange(start, stop)[None]
        part["sample_ids"] = sample["sample_ids"][:, None].expand(1, stop - start)
        return part


def _runs(sample: Fields) -> Tensor:
    """Returns start and stop of each document of a sample, `[n, 2]`, without padding."""
    ids = sample["document_ids"][0]
    changed = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
    starts = torch.cat([changed.new_zeros(1), changed])
    stops = torch.cat([changed, changed.new_tensor([len(ids)])])
    is_token = ids[starts] >= 0
    return torch.stack([starts[is_token], stops[is_token]], 1)
