"""A request on its way through the server, and what becomes of it."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_infer.server.fields import GenerateRequest, RequestError

POLL_SECONDS = 0.1
"""How often a waiting handler looks whether its client is still there."""


@dataclass(frozen=True)
class TextDelta:
    """Text that one prompt's continuation has grown by."""

    index: int
    text: str


@dataclass(frozen=True)
class Answer:
    """A finished request.

    ``text`` holds each prompt with its continuation, ``segments`` and ``tokens`` the same in
    tokens, ``logprobs`` the log-probability of every token but the first of each, or None.
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
    """One request on its way through the service.

    Attributes:
        request: what is asked for.
        client: who asks; clients share the model equally.
        requests_ahead: The number of requests that come first; 0 if this one starts at once.
        tokens: of each prompt, empty until they are encoded.
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
        """Whether the generation may begin."""
        return bool(self.tokens)

    def events(self, client_is_gone: Callable[[], bool]) -> Iterator[TextDelta | Answer | None]:
        """Yields pieces of text and at last the answer; None when nothing happened for a moment.

        Ends early, and ends the generation, if the client is gone.

        Raises:
            RequestError: the generation failed or the server stopped.
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
        """Marks the answer as no longer wanted; the generation ends with its next token."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def put(self, event: TextDelta | Answer | RequestError) -> None:
        """Hands an event to the reader of the job."""
        self._events.put(event)
