"""The job's key-value store, with a deadline on every call.

A store's own time-outs do not cover a keeper that is frozen: its connection stands, and a request
waits for an answer that never comes. So each call is made in a thread of its own, which is left
behind if it does not return. The store serves agreement and failures, never the work of a step.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from megatron_parallel import _compat

PATIENCE: Final = 10.0
"""Seconds for the answer to one request, beyond what the request itself may wait."""


class StoreError(RuntimeError):
    """The store did not answer in time."""


class BoundedStore:
    """A store whose calls end.

    Args:
        store: torch's store.
        patience: Seconds for one answer.
    """

    def __init__(self, store: _compat.Store, patience: float = PATIENCE) -> None:
        self._store = store
        self._patience = patience

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        return int(self._call(self._patience, self._store.add, key, amount))

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        self._call(self._patience, self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is there."""
        return bytes(self._call(self._patience, self._store.get, key))

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys are there."""
        return bool(self._call(self._patience, self._store.check, keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Returns when all keys are there."""
        self._call(self._patience + timeout.total_seconds(), self._store.wait, keys, timeout)

    @staticmethod
    def _call(seconds: float, request: Callable[..., Any], *arguments: Any) -> Any:
        outcome: list[tuple[Any, BaseException | None]] = []

        def ask() -> None:
            try:
                outcome.append((request(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - raised below, where somebody waits
                outcome.append((None, error))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        if not outcome:
            raise StoreError(f"the job's store did not answer within {seconds:g} s")
        answer, error = outcome[0]
        if error is not None:
            raise error
        return answer


def default_store(patience: float = PATIENCE) -> BoundedStore:
    """Returns the store that the default process group was built on."""
    return BoundedStore(_compat.default_store(), patience)
