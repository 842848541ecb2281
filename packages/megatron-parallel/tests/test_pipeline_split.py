"""Layers of each stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_parallel import LayoutError
from megatron_parallel.pipeline import chunk_layers, split_layers


def sizes(*args: int, **options: object) -> list[int]:
    return [len(layers) for layers in split_layers(*args, **options)]  # type: ignore[arg-type]


def test_equal_stages_by_default() -> None:
    assert split_layers(8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert split_layers(5, 1) == (range(5),)


def test_chunks_of_a_rank_are_pp_stages_apart() -> None:
    split = split_layers(8, 2, 2)
    assert chunk_layers(split, 2, 0) == (range(2), range(4, 6))
    assert chunk_layers(split, 2, 1) == (range(2, 4), range(6, 8))


def test_first_and_last_stage_of_given_size() -> None:
    assert sizes(8, 3, first=2) == [2, 3, 3]
    assert sizes(8, 4, first=1, last=1) == [1, 3, 3, 1]
    assert sizes(5, 2, last=2) == [3, 2]
    assert sizes(5, 2, first=0) == [0, 5]  # only the embedding
    assert sizes(5, 2, first=3, last=2) == [3, 2]


def test_given_sizes_are_spread_over_the_chunks_of_a_rank() -> None:
    assert sizes(12, 3, 2, first=2, last=2) == [1, 4, 1, 1, 4, 1]


def test_embedding_and_loss_count_as_layers() -> None:
    assert sizes(6, 4, count_embedding=True, count_loss=True) == [1, 2, 2, 1]
    assert sizes(1, 3, count_embedding=True, count_loss=True) == [0, 1, 0]
    assert sizes(7, 2, count_loss=True) == [4, 3]
    assert sizes(6, 2, 2, count_embedding=True, count_loss=True) == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((5, 2), {}, r"^5 layers cannot be split evenly over 2 stages: use 4 or 6 layers"),
        ((6, 2, 2), {}, r"^6 layers .* over 2 ranks x 2 chunks = 4 stages: use 4 or 8 layers"),
        ((3, 4), {}, r"use 4 layers"),
        ((5, 2), {"count_embedding": True, "count_loss": True}, r"5 layers \+ embedding \+ loss"),
        ((8, 4), {"first": 3}, r"8 layers with first=3 leave 5 for the other 3 ranks"),
        ((8, 4), {"first": 4, "last": 4}, r"leave 0 for the other 2 ranks"),
        ((8, 2), {"first": 9}, r"leave -1 .* use 10 layers"),
        ((8, 2), {"first": 3, "last": 4}, r"8 layers are not first=3, last=4"),
        ((8, 2, 2), {"first": 3}, r"first=3 layers cannot be split over vpp=2 chunks"),
        ((8, 1), {"first": 4, "last": 4}, r"pp=1 has one rank, both first and last"),
        ((8, 2), {"first": 4, "count_loss": True}, r"exclude counting embedding or loss"),
        ((0, 2), {}, r"all must be at least 1"),
    ],
)
def test_an_impossible_split_is_refused_with_its_numbers(
    arguments: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        split_layers(*arguments, **options)  # type: ignore[arg-type]


def test_a_rank_outside_the_pipeline_is_refused() -> None:
    with pytest.raises(LayoutError, match="pipeline rank 2 does not exist: pp=2"):
        chunk_layers(split_layers(4, 2), 2, 2)


@given(
    layers=st.integers(1, 64),
    pp=st.integers(1, 8),
    vpp=st.integers(1, 3),
    first=st.none() | st.integers(0, 12),
    last=st.none() | st.integers(0, 12),
    embedding=st.booleans(),
    loss=st.booleans(),
)
def test_every_layer_is_held_exactly_once(
    layers: int,
    pp: int,
    vpp: int,
    first: int | None,
    last: int | None,
    embedding: bool,
    loss: bool,
) -> None:
    try:
        split = split_layers(
            layers, pp, vpp, first=first, last=last, count_embedding=embedding, count_loss=loss
        )
    except LayoutError as error:
        assert "\n" not in str(error)
        return
    assert len(split) == pp * vpp
    assert [layer for stage in split for layer in stage] == list(range(layers))
    by_rank = [chunk_layers(split, pp, rank) for rank in range(pp)]
    held = [layer for chunks in by_rank for chunk in chunks for layer in chunk]
    assert sorted(held) == list(range(layers))
