"""A few values that are kept, of many that can be computed."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class LRUCache(Generic[_T]):
    """The `maxsize` values asked for last; loader processes begin with none.

    Not `lru_cache`: on methods it holds its owner in a circle, and with it the files it maps.
    """

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._values: OrderedDict[Hashable, _T] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Returns the value of a key, made if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
        else:
            self._values[key] = compute()
            if len(self._values) > self._maxsize:
                self._values.popitem(last=False)
        return self._values[key]

    def __reduce__(self) -> tuple[type["LRUCache[_T]"], tuple[int]]:
        return type(self), (self._maxsize,)
