"""A cache of computed values."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class LRUCache(Generic[_T]):
    """Caches the `maxsize` most recently used values. Pickling empties the cache.

    `functools.lru_cache` on a method would create a reference cycle with its owner, which would
    keep the memory-mapped files of the owner open.
    """

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._values: OrderedDict[Hashable, _T] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Returns the value of a key. Computes it if it is not cached."""
        if key in self._values:
            self._values.move_to_end(key)
        else:
            self._values[key] = compute()
            if len(self._values) > self._maxsize:
                self._values.popitem(last=False)
        return self._values[key]

    def __reduce__(self) -> tuple[type["LRUCache[_T]"], tuple[int]]:
        return type(self), (self._maxsize,)
