"""Scheduling of requests. This module does not import torch.

Running requests take turns, one forward pass each. Passes, running slots and waiting slots are
shared equally among clients, not among requests.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from queue import Full

from megatron_infer.server.job import Job


class Scheduler:
    """The queue of waiting requests and the running requests. It is not thread-safe.

    - A running slot goes to the client with the fewest running requests, and among these to the
      earliest request. With two or more slots, no client gets all of them.
    - The next pass goes to the client whose last pass is longest ago, and among its requests to the
      one whose last pass is.
    - When all waiting slots are taken, a new request replaces the newest request of the client with
      the most requests, if that client still has at least as many as the new request's client.

    Args:
        max_running: The largest number of running requests; each has a cache.
        max_waiting: The largest number of waiting requests.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self._max_running = max_running
        self._capacity = max_running + max_waiting
        self._number = count(1)
        self._last: dict[Job | str, int] = {}  # number of the last pass of a request or client

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def __iter__(self) -> Iterator[Job]:
        return iter([*self.running, *self.waiting])

    def requests_ahead(self, client: str) -> int:
        """Returns how many requests precede a new one of a client; 0 if it would start at once."""
        return 0 if not self.waiting and self._can_run(client) else len(self)

    def add(self, request: Job) -> Job | None:
        """Queues a request.

        Returns:
            The request that it replaces, or None.

        Raises:
            queue.Full: All slots are taken, and no other client has a larger share.
        """
        evicted = None
        if len(self) >= self._capacity:
            evicted = self._largest_share(request.client)
            if evicted is None:
                raise Full(f"{len(self)} requests are running or waiting, which is the limit")
            self.waiting.remove(evicted)
        self.waiting.append(request)
        return evicted

    def start(self) -> None:
        """Starts as many waiting requests as there are running slots."""
        while candidates := [
            one for one in self.waiting if one.ready and self._can_run(one.client)
        ]:
            held = Counter(one.client for one in self.running)
            chosen = min(candidates, key=lambda one: held[one.client])  # the first of equals
            self.waiting.remove(chosen)
            self.running.append(chosen)

    def next_job(self) -> Job | None:
        """Returns the request of the next pass and counts that pass; None if nothing runs."""
        if not self.running:
            return None
        chosen = min(
            self.running, key=lambda one: (self._last.get(one.client, 0), self._last.get(one, 0))
        )
        self._last[chosen] = self._last[chosen.client] = next(self._number)
        return chosen

    def remove(self, request: Job) -> None:
        """Removes a request if it is present."""
        for held in (self.running, self.waiting):
            if request in held:
                held.remove(request)
        self._last.pop(request, None)
        if all(one.client != request.client for one in self):
            self._last.pop(request.client, None)

    def _can_run(self, client: str) -> bool:
        if len(self.running) >= self._max_running:
            return False
        held = sum(one.client == client for one in self.running)
        return held < max(1, self._max_running - 1)

    def _largest_share(self, client: str) -> Job | None:
        """Returns the request that a new one of ``client`` may replace, or None."""
        held = Counter(one.client for one in self)
        waiting = [one for one in reversed(self.waiting) if held[one.client] > held[client] + 1]
        return max(waiting, key=lambda one: held[one.client], default=None)
