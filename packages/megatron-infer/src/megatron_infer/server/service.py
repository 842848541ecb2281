"""One thread that generates, and the requests that wait for it.

The model answers one request at a time, in the order of their arrival; the prompts of a request go
through it together. Handlers of connections hand in a `Job` and read its events.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron_data import DataError, Tokenizer
from megatron_models import GPT

from megatron_infer.detokenize import TextStream
from megatron_infer.engine.batch import generate_tokens, score_tokens
from megatron_infer.engine.generate import stop_tokens
from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams
from megatron_infer.server.fields import GenerateRequest, RequestError

log = logging.getLogger("megatron_infer.server")

POLL_SECONDS = 0.1
"""How often a waiting handler looks whether its client is still there."""


@dataclass(frozen=True)
class Piece:
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
        """Return the fields as they are sent."""
        return dict(vars(self))


class _Cancelled(Exception):  # noqa: N818
    """Ends a generation that nobody waits for any more."""


class Job:
    """One request on its way through the service."""

    def __init__(self, request: GenerateRequest, tokens: list[list[int]]) -> None:
        self.request = request
        self.tokens = tokens
        self.ahead = 0
        self._events: queue.SimpleQueue[Piece | Answer | RequestError] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    def events(self, client_is_gone: Callable[[], bool]) -> Iterator[Piece | Answer | None]:
        """Yield pieces of text and at last the answer; None when nothing happened for a moment.

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
        """Say that nobody waits any more; the generation ends with its next token."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any more."""
        return self._cancelled.is_set()

    def put(self, event: Piece | Answer | RequestError) -> None:
        """Hand an event to whoever waits."""
        self._events.put(event)


class GenerationService:
    """A model, its tokenizer, and the thread in which the model runs.

    Args:
        model: a whole GPT on any device.
        tokenizer: of the model.
        max_tokens_per_request: of prompts and continuations together.
        max_waiting: requests that may wait while another one is answered.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        max_tokens_per_request: int = 12000,
        max_waiting: int = 16,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens_per_request
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._thread.start()

    @property
    def positions(self) -> int:
        """How many tokens a prompt and its continuation may have together."""
        return self._model.config.max_position_embeddings

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted and the generating thread lives."""
        return self._thread.is_alive() and not self._closing

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        with self._changed:
            return len(self._waiting) + (self._running is not None)

    def submit(self, request: GenerateRequest) -> Job:
        """Check a request against the model and queue it.

        Raises:
            RequestError: 400 if it does not fit the model or the limits, 429 if too many wait, 503
                if the service is stopping.
        """
        job = Job(request, self._encode(request))
        with self._changed:
            if not self.healthy:
                raise RequestError(503, "the server is stopping")
            self._waiting = deque(one for one in self._waiting if not one.cancelled)
            job.ahead = len(self._waiting) + (self._running is not None)
            if job.ahead > self._max_waiting:
                raise RequestError(429, f"{job.ahead} requests came before; try again later")
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def close(self, grace_seconds: float = 0.0) -> None:
        """Accept nothing more, give accepted requests some time, then end what still runs."""
        deadline = time.monotonic() + grace_seconds
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while (self._waiting or self._running) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for job in [*self._waiting, *filter(None, [self._running])]:
                job.cancel()
                job.put(RequestError(503, "the server stopped before the answer was complete"))
            self._waiting.clear()
        self._thread.join(timeout=5.0)

    def _encode(self, request: GenerateRequest) -> list[list[int]]:
        """Return the prompts' tokens."""
        try:
            prompts = self._tokenizer.encode_batch(request.prompts)
        except DataError as error:
            raise RequestError(400, f"prompts: {error}") from None
        if request.add_BOS:
            start = self._tokenizer.bos_id
            if start is None:
                raise RequestError(
                    400, "add_BOS: this model's tokenizer has no token that begins a text"
                )
            prompts = [[start, *tokens] for tokens in prompts]
        new, total = request.tokens_to_generate, 0
        for place, tokens in enumerate(prompts):
            if not tokens:
                raise RequestError(400, f"prompts[{place}] has no tokens: nothing to continue")
            if len(tokens) + new > self.positions:
                raise RequestError(
                    400,
                    f"prompts[{place}] has {len(tokens)} tokens, tokens_to_generate is {new}, and "
                    f"the model has {self.positions} positions: shorten one of them",
                )
            total += len(tokens) + new
        if total > self._max_tokens:
            raise RequestError(
                400,
                f"prompts and tokens_to_generate come to {total} tokens, {self._max_tokens} are "
                "allowed in a request: send fewer prompts or ask for less",
            )
        return prompts

    def _work(self) -> None:
        """Answer requests until the service is closed."""
        while True:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                job = self._running = self._waiting.popleft()
            try:
                job.put(self._answer(job))
            except _Cancelled:
                continue
            except InferError as error:
                log.error("a generation failed: %s", error)
                job.put(RequestError(500, str(error)))
            except torch.OutOfMemoryError:
                log.error("a generation ran out of memory")
                job.put(RequestError(503, "out of memory: send fewer or shorter prompts"))
            except Exception:  # a bug: the log has it whole, and the thread lives for the others
                log.exception("a generation failed")
                job.put(RequestError(500, "internal error; the server's log says more"))

    def _answer(self, job: Job) -> Answer:
        """Run one request."""
        if job.cancelled:
            raise _Cancelled
        request, new = job.request, job.request.tokens_to_generate
        if new == 0:
            scores = score_tokens(self._model, job.tokens)
            texts, reasons = [""] * len(scores), ["length"] * len(scores)
            return self._complete(job, texts, [()] * len(scores), scores, reasons)
        streams = [TextStream(self._tokenizer, before=tokens) for tokens in job.tokens]
        texts = [""] * len(streams)

        def show(index: int, text: str) -> None:
            texts[index] += text
            if text:
                job.put(Piece(index, text))

        def on_token(index: int, token: int) -> None:
            if job.cancelled:
                raise _Cancelled
            show(index, streams[index].push(token))

        continuations = generate_tokens(
            self._model,
            job.tokens,
            [_sampling(request, index) for index in range(len(streams))],
            stop_tokens=stop_tokens(self._tokenizer),
            on_token=on_token,
            log_probs=request.logprobs,
        )
        for index, stream in enumerate(streams):
            show(index, stream.finish())
        scores = [one.log_probs or () for one in continuations]
        tokens = [one.tokens for one in continuations]
        return self._complete(
            job, texts, tokens, scores, [one.finish_reason for one in continuations]
        )

    def _complete(
        self,
        job: Job,
        texts: list[str],
        continuations: list[tuple[int, ...]],
        scores: list[tuple[float, ...]],
        reasons: list[str],
    ) -> Answer:
        whole = [[*old, *new] for old, new in zip(job.tokens, continuations, strict=True)]
        pairs = zip(job.request.prompts, texts, strict=True)
        return Answer(
            text=[prompt + text for prompt, text in pairs],
            segments=[self._segments(tokens) for tokens in whole],
            tokens=whole,
            logprobs=[list(one) for one in scores] if job.request.logprobs else None,
            finish_reasons=reasons,
        )

    def _segments(self, tokens: list[int]) -> list[str]:
        """Return the text of each token; a character of several tokens is the last one's."""
        stream = TextStream(self._tokenizer)
        segments = [stream.push(token) for token in tokens]
        segments[-1] += stream.finish()
        return segments


def _sampling(request: GenerateRequest, index: int) -> SamplingParams:
    seed = request.random_seed
    return SamplingParams(
        max_new_tokens=request.tokens_to_generate,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p or 1.0,
        seed=None if seed is None else seed + index,
    )
