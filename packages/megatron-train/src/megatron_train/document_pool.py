"""The documents of global batches as rows for the ranks of a pool (--hybrid-context-parallel).

Packed documents that do not attend to each other need not be cut over equally many ranks. For each
global batch the data- and context-parallel ranks, one pool, agree on which of them take which
documents (`megatron_parallel.context_parallel.plan_pool`): each rank reads its share of the samples
to see where documents begin and end, the lengths of all go over the pool in two small messages, all
make the same plan, and each reads the samples that its rows are made of.

A row is a micro-batch of one row: tokens of several documents, perhaps of several samples, one
after the other, and padding that lets its ranks have equal parts. What masks and dropout are made
of says where each token came from:

- `document_ids` `[1, s]`: number of the document in the row; -1 is padding.
- `sample_ids` `[1, s]`: number of its sample.
- `indices_in_sample` `[1, s]`: its place in that sample; -1 is padding.

The row's `split` says which places each of its ranks holds. The samples and tokens of all
micro-batches of all ranks of the pool add up to those of the global batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from megatron_parallel import Mesh, all_reduce
from megatron_parallel.context_parallel import ContextSplit, PoolPlan, PoolRow, plan_pool
from torch import Tensor

from megatron_train.tasks.task import MicroBatch

Fields = Mapping[str, Tensor]
Read = Callable[[Sequence[int]], Fields]
"""Reads samples by their numbers: fields `[b, s]` and `[b]`."""

_BY_TOKEN: Final = ("tokens", "labels", "loss_mask", "positions")


class DocumentPool:
    """Makes this rank's micro-batches of a global batch.

    All ranks of the pool ask for the same global batches in the same order.

    Args:
        mesh: where this rank stands.
        max_tokens_per_rank: tokens that one rank may hold at a time.
        multiple: every rank's part of a row is a multiple of this.
        tokens_per_pair: work of a pair of query and key in attention, in units of all other work of
            one token.
        log: is given one line about the plan of the first global batch.
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
        """Returns this rank's micro-batches of the global batch of these samples.

        Every rank gets equally many, of other lengths; some may hold nothing but padding.

        Raises:
            LayoutError: a document that does not fit into the pool.
            CollectiveError: a rank that does not take part, within the mesh's time-out.
        """
        samples = _Samples(read, numbers)
        ends = self._document_ends(samples, numbers)
        plan = self._plan([stop - start for _, start, stop in ends])
        some = self._axis.index % len(numbers)  # one that is read anyway
        length = samples[some]["tokens"].shape[1]
        share = len(range(self._axis.index, len(numbers), self._axis.size))
        rows: list[MicroBatch] = []
        for row in plan.rows_of(self._axis.index):
            taken = () if row is None else row.documents
            parts = [samples.part(*ends[number]) for number in taken]
            fields = self._filled(parts or [samples.part(some, 0, 0)], row)
            ranks = 1 if row is None else len(row.ranks)
            split = ContextSplit.per_document(fields["document_ids"], ranks)
            counted = 0 if rows else share  # of all samples of this rank, with its first row
            rows.append(MicroBatch(fields, counted, counted * length, split))
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
        """Every document of the batch: index of its sample there, where it begins and ends."""
        axis = self._axis
        own = {i: _runs(samples[i]) for i in range(axis.index, len(numbers), axis.size)}
        widest = torch.tensor([max(map(len, own.values()), default=0)], device=self._device)
        width = int(all_reduce(widest, axis, op="max", purpose="numbers of documents"))
        table = torch.zeros((len(numbers), width, 2), dtype=torch.int64)
        for i, runs in own.items():
            table[i, : len(runs)] = runs
        table = all_reduce(table.to(self._device), axis, purpose="ends of documents").cpu()
        return [
            (i, start, stop)
            for i, ends in enumerate(table.tolist())
            for start, stop in ends
            if stop > start
        ]

    def _filled(self, parts: Sequence[dict[str, Tensor]], row: PoolRow | None) -> dict[str, Tensor]:
        """Returns the documents of a row one after the other, and padding to its length."""
        length = self._multiple if row is None else row.padded_length
        for number, part in enumerate(parts):
            part["document_ids"] = torch.full_like(part["document_ids"], number)
        fields = {}
        for name in parts[0]:
            whole = torch.cat([part[name] for part in parts], 1)
            value = -1 if name in ("document_ids", "indices_in_sample") else 0
            fields[name] = torch.nn.functional.pad(whole, (0, length - whole.shape[1]), value=value)
        return fields


class _Samples:
    """Samples of a global batch, each read when it is first asked for."""

    def __init__(self, read: Read, numbers: Sequence[int]) -> None:
        self._read = read
        self._numbers = numbers
        self._found: dict[int, Fields] = {}

    def __getitem__(self, index: int) -> Fields:
        if index not in self._found:
            self._found[index] = self._read([self._numbers[index]])
        return self._found[index]

    def part(self, index: int, start: int, stop: int) -> dict[str, Tensor]:
        """Returns a document's tokens, and where they came from."""
        sample = self[index]
        part = {name: sample[name][:, start:stop] for name in (*_BY_TOKEN, "document_ids")}
        part["indices_in_sample"] = torch.arange(start, stop)[None]
        part["sample_ids"] = sample["sample_ids"][:, None].expand(1, stop - start)
        return part


def _runs(sample: Fields) -> Tensor:
    """Returns where each document of a sample begins and ends, `[n, 2]`; padding is none."""
    ids = sample["document_ids"][0]
    changes = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
    starts = torch.cat([changes.new_zeros(1), changes])
    stops = torch.cat([changes, changes.new_tensor([len(ids)])])
    true = ids[starts] >= 0
    return torch.stack([starts[true], stops[true]], 1)
