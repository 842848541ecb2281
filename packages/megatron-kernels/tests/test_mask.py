"""The mask, against hand-written pictures and its definition in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import KernelError, Mask, attention


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def picture(mask: Mask, queries: int, keys: int, offset: int = 0) -> list[str]:
    rows = mask.allowed(queries, keys, offset)[0]
    return ["".join("x" if allowed else "." for allowed in row) for row in rows]


def test_causal() -> None:
    assert picture(Mask(), 4, 4) == ["x...", "xx..", "xxx.", "xxxx"]


def test_queries_of_a_cache_start_at_the_offset() -> None:
    assert picture(Mask(), 2, 5, offset=2) == ["xxx..", "xxxx."]


def test_a_window_counts_the_query_itself() -> None:
    assert picture(Mask(window=2), 4, 4) == ["x...", "xx..", ".xx.", "..xx"]
    assert picture(Mask(window=2, causal=False), 4, 4) == ["xx..", "xxx.", ".xxx", "..xx"]


def test_a_chunk_hides_the_chunks_before() -> None:
    assert picture(Mask(chunk=2), 4, 4) == ["x...", "xx..", "..x.", "..xx"]
    assert picture(Mask(chunk=3), 2, 5, offset=3) == ["...x.", "...xx"]
    assert Mask(chunk=4).lower(4, 4) == (None, True)
    assert Mask(chunk=3).lower(4, 4)[0] is not None


def test_a_mask_is_narrowed_by_windows_and_chunks() -> None:
    mask = Mask(window=3).narrowed(window=2, chunk=3)
    assert picture(mask, 4, 4) == ["x...", "xx..", ".xx.", "...x"]
    assert Mask(window=2).narrowed(5).window == 2
    assert (plain := Mask()).narrowed() is plain
    with pytest.raises(KernelError, match="chunk is 3 and would become 4"):
        mask.narrowed(chunk=4)
    with pytest.raises(KernelError, match="a dense mask cannot be narrowed"):
        Mask(window=2).prepare(4, 4).narrowed(window=1)
    with pytest.raises(KernelError, match="chunk is 0"):
        Mask(chunk=0)


def test_all_queries_attend_to_a_prefix() -> None:
    assert picture(Mask(prefix=3), 4, 4) == ["xxx.", "xxx.", "xxx.", "xxxx"]
    each = Mask(prefix=torch.tensor([0, 2])).allowed(2, 2)
    assert each.tolist() == [[[True, False], [True, True]], [[True, True], [True, True]]]


def test_documents_attend_only_to_themselves_and_padding_to_nothing() -> None:
    mask = Mask(document_ids=ints([0, 0, 1, 1, -1]))
    assert picture(mask, 5, 5) == ["x....", "xx...", "..x..", "..xx.", "....."]


def test_megatrons_golden_document_mask() -> None:
    # formats.md, golden D (megatron-core's left-to-right masks, all resets on; 1 = masked): tokens
    # 5 6 0 7 0 8 with end-of-document 0, which still belongs to the document it ends.
    theirs = ["011111", "001111", "000111", "111011", "111001", "111110"]
    mask = Mask(document_ids=ints([0, 0, 0, 1, 1, 2]), positions=ints([0, 1, 2, 0, 1, 0]))
    assert picture(mask, 6, 6) == [r.replace("0", "x").replace("1", ".") for r in theirs]


def test_positions_decide_when_keys_are_not_in_order() -> None:
    # The zig-zag split of context parallelism: rank 0 of 2 holds parts 0 and 3 of four.
    mask = Mask(positions=ints([0, 1, 6, 7]))
    assert picture(mask, 4, 4) == ["x...", "xx..", "xxx.", "xxxx"]
    other = Mask(positions=ints([2, 3, 4, 5]), query_positions=ints([0, 1, 6, 7]))
    assert picture(other, 4, 4) == ["....", "....", "xxxx", "xxxx"]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_combination_of_rules_equals_their_definition(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 7))
    queries = data.draw(st.integers(1, keys))
    offset = data.draw(st.integers(0, keys - queries))
    ids = data.draw(st.none() | st.lists(st.integers(-1, 2), min_size=keys, max_size=keys))
    positions = data.draw(st.none() | st.permutations(range(keys)))
    causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 8))
    prefix = data.draw(st.none() | st.integers(0, 8))
    mask = Mask(
        document_ids=None if ids is None else ints(ids),
        positions=None if positions is None else ints(list(positions)),
        causal=causal,
        window=window,
        prefix=prefix,
    )
    position, document = positions or range(keys), ids or [0] * keys
    for row in range(queries):
        for key in range(keys):
            query = row + offset
            distance = position[query] - position[key]
            expected = document[query] == document[key] >= 0
            if causal:
                expected &= distance >= 0 or (prefix is not None and position[key] < prefix)
            if window is not None:
                expected &= abs(distance) < window
            assert bool(mask.allowed(queries, keys, offset)[0, row, key]) == expected


def test_masks_that_kernels_support_need_no_tensor() -> None:
    assert Mask().lower(5, 5) == (None, True)
    assert Mask(causal=False).lower(5, 9) == (None, False)
    assert Mask().lower(1, 9, 8) == (None, False)
    assert Mask(window=5).lower(5, 5) == (None, True)
    assert Mask(causal=False, prefix=3).lower(5, 5) == (None, False)
    for mask, sizes in [
        (Mask(), (2, 5, 3)),
        (Mask(), (1, 9, 3)),
        (Mask(window=4), (5, 5, 0)),
        (Mask(prefix=2), (5, 5, 0)),
    ]:
        written, _ = mask.lower(*sizes)
        assert written is not None and torch.equal(written, mask.allowed(*sizes))


def test_a_prepared_mask_gives_the_same_attention() -> None:
    q = torch.randn(6, 1, 2, 8, dtype=torch.float64)
    mask = Mask(document_ids=ints([0, 0, 1, 1, 1, -1]))
    prepared = mask.prepare(6, 6)
    assert prepared.dense is not None
    assert torch.equal(attention(q, q, q, prepared), attention(q, q, q, mask))
    assert Mask().prepare(6, 6).dense is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask(window=0), "window is 0"),
        (lambda: Mask(query_document_ids=ints([0])), "needs document_ids"),
        (lambda: Mask(query_positions=ints([0])), "needs positions"),
        (lambda: Mask(document_ids=ints([0, 0])).allowed(3, 3), r"is of size \[2\].*needs \[3\]"),
        (lambda: Mask(positions=ints([0, 1])).allowed(2, 2, 1), "positions of the queries"),
        (lambda: Mask(window=1).prepare(2, 2).allowed(3, 3), r"dense is of size \[2, 2\]"),
    ],
)
def test_contradictory_masks_are_errors(make: object, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        make()  # type: ignore[operator]
