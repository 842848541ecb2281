"""The cache of the most recently used values."""

import pickle

import pytest
from megatron_data.lru_cache import LRUCache


def test_the_least_recently_used_value_is_computed_again() -> None:
    computed: list[str] = []
    cache: LRUCache[str] = LRUCache(2)

    def get(key: str) -> str:
        return cache.get(key, lambda: computed.append(key) or key.upper())  # type: ignore[func-returns-value]

    assert [get(key) for key in "abab"] == ["A", "B", "A", "B"]
    assert computed == ["a", "b"]
    assert [get(key) for key in "acab"] == ["A", "C", "A", "B"]  # c replaced b
    assert computed == ["a", "b", "c", "b"]


@pytest.mark.parametrize("size", [1, 3])
def test_a_copy_in_another_process_is_empty_and_has_the_same_size(size: int) -> None:
    cache: LRUCache[int] = LRUCache(size)
    cache.get("key", lambda: 1)
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.get("key", lambda: 2) == 2
    for key in range(size - 1):
        copy.get(key, lambda: 0)
    assert copy.get("key", lambda: 3) == 2
