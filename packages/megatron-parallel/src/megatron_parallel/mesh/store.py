"""The key-value store of the job, with a deadline on every call.

The time-outs of a store do not cover a frozen server process: its connection stays open, and a
request waits for an answer that never arrives. Each call therefore runs in a thread of its own,
which is abandoned if it does not return. The store is used for agreement and for reports of
failures, never within a step.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from megatron_parallel import _compat

PATIENCE: Final = 10.0
"""Seconds to wait for the answer to a request, in addition to the time-out of the request."""


class StoreError(RuntimeError):
    """The store did not answer in time."""


class BoundedStore:
    """A store whose calls have a deadline.

    Args:
        store: The store of torch.
        patience: Seconds to wait for an answer.

    Raises:
        StoreError: A call is not answered in time.
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
        """Returns the value of an existing key."""
        return bytes(self._call(self._patience, self._store.get, key))

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys exist."""
        return bool(self._call(self._patience, self._store.check, keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until all keys exist."""
        self._call(self._patience + timeout.total_seconds(), self._store.wait, keys, timeout)

    @staticmethod
    def _call(seconds: float, request: Callable[..., Any], *arguments: Any) -> Any:
        outcome: list[tuple[Any, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((request(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - raised below, in the calling thread
                outcome.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if not outcome:
            raise StoreError(f"the job's store did not answer within {seconds:g} s")
        answer, error = outcome[0]
        if error is not None:
            raise error
        return answer


def default_store(patience: float = PATIENCE) -> BoundedStore:
    """Returns the store of the default process group."""
    return BoundedStore(_compat.default_store(), patience)
