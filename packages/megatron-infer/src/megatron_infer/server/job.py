"""A request in the server and the events that it produces."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_infer.server.fields import GenerateRequest, RequestError

POLL_SECONDS = 0.1
"""The interval at which a waiting handler checks whether its client is connected."""


@dataclass(frozen=True)
class TextDelta:
    """New text of the continuation of one prompt."""

    index: int
    text: str


@dataclass(frozen=True)
class Answer:
    """The result of a request.

    ``text`` has each prompt with its continuation; ``segments`` and ``tokens`` have the same as
    texts and ids of tokens. ``logprobs`` has the log-probability of every token but the first of
    each prompt, or is None.
    """

    text: list[str]
    segments: list[list[str]]
    tokens: list[list[int]]
    logprobs: list[list[float]] | None
    finish_reasons: list[str]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as they are sent."""
        return dict(vars(self))


class Job:
    """A request in the service.

    Attributes:
        request: The parsed request.
        client: The identifier of the client. Clients share the model equally.
        requests_ahead: The number of requests that come first; 0 if this one starts at once.
        tokens: The tokens of each prompt; empty until they are encoded.
    """

    def __init__(self, request: GenerateRequest, client: str) -> None:
        self.request = request
        self.client = client
        self.requests_ahead = 0
        self.tokens: list[list[int]] = []
        self._events: queue.SimpleQueue[TextDelta | Answer | RequestError] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether generation can start."""
        return bool(self.tokens)

    def events(self, client_is_gone: Callable[[], bool]) -> Iterator[TextDelta | Answer | None]:
        """Yields pieces of text and finally the answer; None when nothing happened for a moment.

        Stops and cancels the generation if the client is gone.

        Raises:
            RequestError: The generation failed or the server stopped.
        """
        try:
            while not client_is_gone():
                try:
                    event = self._events.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    yield None
                    continue
                if isinstance(event, RequestError):
                    raise event
                yield event
                if isinstance(event, Answer):
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancels the request. Generation ends after its current step."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def put(self, event: TextDelta | Answer | RequestError) -> None:
        """Adds an event for the reader of the job."""
        self._events.put(event)
