"""Which request runs next, and which waits. Nothing here imports torch.

Requests that run take turns, one forward pass each. Passes, places to run and places to wait are
shared out among clients, not among requests: who sends many waits for many.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from queue import Full

from megatron_infer.server.job import Job


class Scheduler:
    """The queue of a server and the requests that run; not safe for several threads.

    - A place to run goes to the client with the fewest requests running, and among those to the
      request that came first. With two or more places no client has all of them.
    - The next pass goes to the client whose last one was longest ago, and among its requests to the
      one whose last pass was.
    - When all places to wait are taken, a newcomer takes the place of the newest request of the
      client with the most requests, if that leaves that client with no fewer than the newcomer's.

    Args:
        max_running: requests that run at once; each holds its cache.
        max_waiting: requests that wait beyond those.
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
        """Returns how many requests come before a new one of a client; 0 if it begins at once."""
        return 0 if not self.waiting and self._can_run(client) else len(self)

    def add(self, request: Job) -> Job | None:
        """Queues a request.

        Returns:
            The request that has lost its place to it, or None.

        Raises:
            queue.Full: all places are taken, and no other client has a larger share.
        """
        evicted = None
        if len(self) >= self._capacity:
            evicted = self._largest_share(request.client)
            if evicted is None:
                raise Full(f"{len(self)} requests came before and all places are taken")
            self.waiting.remove(evicted)
        self.waiting.append(request)
        return evicted

    def start(self) -> None:
        """Lets as many requests run as there are places."""
        while candidates := [
            one for one in self.waiting if one.ready and self._can_run(one.client)
        ]:
            held = Counter(one.client for one in self.running)
            chosen = min(candidates, key=lambda one: held[one.client])  # the first of equals
            self.waiting.remove(chosen)
            self.running.append(chosen)

    def next_job(self) -> Job | None:
        """Returns the request whose pass is next, and counts that pass; None if nothing runs."""
        if not self.running:
            return None
        chosen = min(
            self.running, key=lambda one: (self._last.get(one.client, 0), self._last.get(one, 0))
        )
        self._last[chosen] = self._last[chosen.client] = next(self._number)
        return chosen

    def remove(self, request: Job) -> None:
        """Forgets a request, if it is here."""
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
        """Returns the newest waiting request of the client with the most, if that is fair."""
        held = Counter(one.client for one in self)
        waiting = [one for one in reversed(self.waiting) if held[one.client] > held[client] + 1]
        return max(waiting, key=lambda one: held[one.client], default=None)
