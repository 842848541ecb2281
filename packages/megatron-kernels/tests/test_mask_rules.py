"""Which rules a mask has, which tensors it needs, and what it asks of them."""

from collections.abc import Callable

import pytest
import torch
from megatron_kernels import KernelError, Mask, Pages, Scores
from megatron_kernels.ops.attention.dropout import DropoutHash
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


POSITIONS = ints([0, 1, 2, 3])
IDS = ints([0, 0, 1, 1])
DENSE = torch.ones(1, 4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "index_only", "in_order", "compares"),
    [
        (Mask(), True, True, False),
        (Mask(window=2, causal=False), True, True, False),
        (Mask(chunk=2), False, True, False),
        (Mask(document_ids=IDS), False, True, False),
        (Mask(prefix=1), False, False, False),
        (Mask(prefix=1, causal=False), True, True, False),
        (Mask(dense=DENSE), False, False, False),
        (Mask(positions=POSITIONS), False, False, True),
        (Mask(positions=POSITIONS, ascending=True), False, False, False),
        (Mask(positions=POSITIONS, causal=False), False, False, False),
        (Mask(positions=POSITIONS, causal=False, window=2), False, False, True),
        (Mask(positions=POSITIONS, causal=False, chunk=2), False, False, True),
        (Mask(positions=POSITIONS, causal=False, document_ids=IDS), False, False, False),
        (Mask(positions=POSITIONS, ascending=True, window=2), False, False, True),
        (Mask(positions=POSITIONS, ascending=True, document_ids=IDS), False, False, True),
        (Mask(positions=POSITIONS, ascending=True, prefix=2), False, False, True),
        (Mask(positions=POSITIONS, dense=DENSE), False, False, False),
        (Mask(positions=POSITIONS, dense=DENSE, prepared=True), False, False, True),
    ],
)
def test_rules_by_index_and_by_position(
    mask: Mask, index_only: bool, in_order: bool, compares: bool
) -> None:
    assert (mask.index_only, mask.keys_in_order) == (index_only, in_order)
    assert mask.compares_positions == compares
    assert mask.has_rules == (mask.dense is None or mask.prepared)


def test_masks_by_ascending_positions_need_no_tensor() -> None:
    ascending = Mask(positions=ints([3, 5, 8, 9]), ascending=True)
    assert ascending.lower(4, 4) == (None, True)
    assert Mask(positions=POSITIONS, causal=False).lower(4, 4) == (None, False)
    assert Mask(positions=POSITIONS).lower(4, 4)[0] is not None
    assert Mask(positions=POSITIONS, ascending=True, window=2).lower(4, 4)[0] is not None


@pytest.mark.parametrize("rule", ["window", "chunk"])
def test_a_limit_as_wide_as_the_sequence_needs_no_tensor(rule: str) -> None:
    assert Mask(**{rule: 5}).lower(5, 5) == (None, True)
    assert Mask(**{rule: 5}).lower(1, 5, 4) == (None, False)
    assert Mask(causal=False, **{rule: 5}).lower(5, 5) == (None, False)
    for sizes in ((5, 5, 0), (1, 5, 4)):
        written, is_causal = Mask(**{rule: 4}).lower(*sizes)
        assert written is not None and not is_causal
    # The queries of a cache may be behind all keys, and positions beyond the number of keys.
    assert Mask(**{rule: 5}).lower(2, 5, 4)[0] is not None
    far = Mask(positions=ints([0, 2, 4, 8]), **{rule: 4})
    written, _ = far.lower(4, 4)
    assert written is not None and torch.equal(written, far.allowed(4, 4))
    assert not written[0, 3, 2]


def test_a_single_query_attends_to_all_keys_before_it() -> None:
    assert Mask().lower(1, 4, 3) == (None, False)
    assert Mask().lower(1, 3, 3) == (None, False)
    written, _ = Mask().lower(1, 5, 3)
    assert written is not None and written.tolist() == [[[True] * 4 + [False]]]
    assert Mask().lower(1, 1) == (None, False)


@pytest.mark.parametrize(
    ("mask", "sizes", "alone"),
    [
        (Mask(), (4, 4, 0), True),
        (Mask(window=2), (4, 4, 0), True),
        (Mask(causal=False, prefix=2), (4, 4, 0), True),
        (Mask(), (4, 4, 1), False),
        (Mask(), (3, 4, 0), False),
        (Mask(), (4, 5, 0), False),
        (Mask(), (5, 5, 0), False),
        (Mask(prefix=2), (4, 4, 0), False),
        (Mask(chunk=2), (4, 4, 0), False),
        (Mask(positions=POSITIONS), (4, 4, 0), False),
        (Mask(dense=DENSE), (4, 4, 0), False),
    ],
)
def test_documents_are_computed_alone_if_no_other_rule_needs_all(
    mask: Mask, sizes: tuple[int, int, int], alone: bool
) -> None:
    fields = {name: value for name, value in vars(mask).items() if value is not None}
    known = Mask(**fields, document_ids=IDS, runs=((2, -1, 1),))
    assert known.documents_alone(*sizes) == alone
    assert not Mask(**fields, document_ids=IDS).documents_alone(*sizes)


def test_lengths_are_read_where_they_save_more_than_their_calls_cost() -> None:
    few = torch.zeros(1, 64, dtype=torch.int32)
    assert Mask(document_ids=few).prepare(64, 64).runs == ((64,),)
    few[:, 60:] = -1
    assert Mask(document_ids=few).prepare(64, 64).runs == ((60, -4),)
    assert Mask(document_ids=few).prepare(63, 64, 1).runs is None
    assert Mask(document_ids=few).prepare(32, 64).runs is None
    many = torch.arange(64, dtype=torch.int32)[None]
    assert Mask(document_ids=many).prepare(64, 64).runs is None
    assert Mask(document_ids=many).prepare(64, 64, read_lengths=True).runs == ((1,) * 64,)
    tens = (torch.arange(100, dtype=torch.int32) // 10)[None]
    assert Mask(document_ids=tens).prepare(100, 100).runs == ((10,) * 10,)
    twice = few.clone()
    twice[:, :3] = 7
    twice[:, 62:] = 7
    assert Mask(document_ids=twice).prepare(64, 64, read_lengths=True).runs is None
    padded = few.clone()
    padded[:, 1:3], padded[:, 0] = -1, 5
    assert Mask(document_ids=padded).prepare(64, 64).runs == ((1, -2, 57, -4),)
    padded[:, 10:] += padded[:, 10:] >= 0  # one more document, so one more call
    assert Mask(document_ids=padded).prepare(64, 64).runs is None
    assert Mask(document_ids=IDS, prefix=2).prepare(4, 4, read_lengths=True).runs is None
    both_ways = Mask(document_ids=few, prefix=2, causal=False)  # the prefix has no effect
    assert both_ways.prepare(64, 64).runs == ((60, -4),)
    first = Mask(document_ids=few).prepare(32, 32)  # of more tokens than these
    assert first.runs is None and first.dense is not None
    assert Mask(document_ids=IDS, chunk=2).prepare(4, 4, read_lengths=True).runs is None


def test_lengths_are_not_read_where_that_waits_or_breaks_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = torch.zeros(1, 64, dtype=torch.int32)
    far = Mask(document_ids=ids.to("meta")).prepare(64, 64, device="meta")
    assert far.runs is None and far.dense is not None and far.dense.is_meta
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled = Mask(document_ids=ids).prepare(64, 64)
    assert compiled.runs is None and compiled.dense is not None


def test_distances_are_those_of_positions() -> None:
    mask = Mask(positions=ints([4, 0, 7]), query_positions=ints([5, 1]))
    assert mask.relative_positions(2, 3).tolist() == [[[-1, -5, 2], [3, -1, 6]]]
    assert mask.distance(2, 3).tolist() == [[[1, 5, 2], [3, 1, 6]]]
    assert Mask().relative_positions(2, 3, 1).tolist() == [[[-1, 0, 1], [-2, -1, 0]]]


def test_a_mask_as_a_tensor_is_taken_as_it_is_and_must_fit() -> None:
    rows = torch.tensor([[[True, False], [False, True]]])
    mask = Mask(dense=rows)
    assert torch.equal(mask.allowed(2, 2), rows) and mask.lower(2, 2)[1] is False
    assert mask.prepare(2, 2).prepared is False and Mask(window=1).prepare(2, 2).prepared
    for queries, keys in ((3, 2), (2, 3)):
        with pytest.raises(KernelError, match=rf"dense is of size \[2, 2\].*{queries}, {keys}"):
            mask.allowed(queries, keys)


def test_the_smallest_limits_are_accepted() -> None:
    assert Mask(window=1).allowed(2, 2).tolist() == [[[True, False], [False, True]]]
    assert Mask(chunk=1).allowed(2, 2).tolist() == [[[True, False], [False, True]]]
    for wrong in ({"window": -1}, {"chunk": -2}):
        with pytest.raises(KernelError, match="use at least 1"):
            Mask(**wrong)
    assert Mask(window=3).narrowed(chunk=2).window == 3
    assert Mask(chunk=2).narrowed(window=4).chunk == 2
    assert Mask(chunk=2).narrowed(chunk=2).chunk == 2


SITE = DropoutSite(0, 0, 0, 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mask(document_ids=IDS),
        lambda: Scores(slopes=IDS[0].float()),
        lambda: Pages(IDS, IDS[0, :1]),
        lambda: DropoutHash(IDS, IDS, 0, 4, None, SITE),
    ],
    ids=["mask", "scores", "pages", "dropout"],
)
def test_values_with_tensors_are_compared_by_identity(make: Callable[[], object]) -> None:
    one, other = make(), make()
    assert one == one and one != other and len({one, other}) == 2


def test_scores_of_some_heads_and_keys_are_parts_of_all() -> None:
    bias = torch.arange(24.0).view(1, 4, 2, 3)
    scores = Scores(0.5, 2.0, torch.arange(4.0), torch.arange(4.0) + 10, bias)
    part = scores.of_heads(1, 2)
    assert (part.scale, part.softcap) == (0.5, 2.0)
    assert part.slopes is not None and part.slopes.tolist() == [1, 2]
    assert part.sinks is not None and part.sinks.tolist() == [11, 12]
    assert part.bias is not None and torch.equal(part.bias, bias[:, 1:3])
    few = scores.of_keys(2)
    assert few.bias is not None and torch.equal(few.bias, bias[..., :2])
    assert few.slopes is scores.slopes and scores.without_sinks().sinks is None
    assert scores.without_sinks().bias is bias
    with pytest.raises(KernelError, match=r"softcap is -0\.5; it must be 0 \(none\) or above"):
        Scores(softcap=-0.5)
    plain = Scores()
    assert plain.of_keys(1) is plain and plain.without_sinks() is plain
    scores.check_shapes(5, 4, 2, 3)
    for heads, queries, keys in ((3, 2, 3), (4, 3, 3), (4, 2, 4)):
        with pytest.raises(KernelError, match="bias has shape"):
            scores.check_shapes(5, heads, queries, keys)
    with pytest.raises(KernelError, match=r"sinks have shape \[4\]; 5 heads need \[5\]"):
        Scores(sinks=torch.zeros(4)).check_shapes(1, 5, 2, 3)
