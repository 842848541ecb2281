"""The service that runs the model in one thread and schedules requests.

Connection handlers submit a request, get a `Job` and read its events. Each running request has its
own batch. `Scheduler` decides which one runs the next forward pass.
"""

import logging
import queue
import threading
import time
from typing import Any

import torch
from megatron_data import DataError, Tokenizer
from megatron_parallel.memory import is_out_of_memory

from megatron_infer.defaults import GenerationDefaults
from megatron_infer.engine.generate import encode_texts
from megatron_infer.engine.stages import AnyModel, LocalStages, evaluating
from megatron_infer.errors import InferError
from megatron_infer.server.fields import GenerateRequest, RequestError, request_defaults
from megatron_infer.server.generation import Generation
from megatron_infer.server.job import Answer, Job
from megatron_infer.server.scheduler import Scheduler

log = logging.getLogger("megatron_infer.server")


class GenerationService:
    """A model, its tokenizer, and the thread in which the model runs.

    Args:
        model: A whole model on any device. It stays in eval mode until the service is closed.
        tokenizer: The tokenizer of the model.
        max_tokens_per_request: The limit for the number of prompts times the length of the longest
            prompt with its continuation. Defaults to 12000.
        max_running: The largest number of requests that take turns; each has a cache. Defaults to
            4.
        max_waiting: The largest number of requests that wait. Defaults to 64.
        defaults: Settings of generation that the model brings along
            (`LoadedModel.defaults`). Defaults to none.
    """

    def __init__(
        self,
        model: AnyModel,
        tokenizer: Tokenizer,
        *,
        max_tokens_per_request: int = 12000,
        max_running: int = 4,
        max_waiting: int = 64,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        self._model = model
        self._positions = LocalStages(model).positions
        self._tokenizer = tokenizer
        self._defaults = defaults or GenerationDefaults()
        self._max_tokens = max_tokens_per_request
        self._scheduler = Scheduler(max_running, max_waiting)
        self._generations: dict[Job, Generation] = {}  # of running jobs; used by the thread only
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._thread.start()

    @property
    def positions(self) -> int:
        """The largest number of tokens of a prompt and its continuation."""
        return self._positions

    @property
    def request_defaults(self) -> dict[str, Any]:
        """The defaults of the fields of a request, where the model has its own."""
        start = self._tokenizer.bos_id
        edges = encode_texts(
            self._tokenizer, [""], special_tokens=self._defaults.adds_special_tokens
        )[0]
        return request_defaults(
            self._defaults.params, starts_with_bos=start is not None and edges[:1] == [start]
        )

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted and the generating thread runs."""
        return self._thread.is_alive() and not self._closing

    @property
    def unfinished(self) -> int:
        """The number of requests that run or wait."""
        with self._changed:
            return len(self._scheduler)

    def submit(self, request: GenerateRequest, client: str = "") -> Job:
        """Queues a request and checks it against the model.

        Args:
            request: The request.
            client: The identifier of the client. Clients get equal shares, independent of their
                number of requests.

        Raises:
            RequestError: 400 if the request does not fit the model or the limits, 429 if too many
                requests wait, 503 if the service is stopping.
        """
        job = Job(request, client)
        with self._changed:
            if not self.healthy:
                raise RequestError(503, "the server is stopping")
            self._remove_cancelled()
            job.requests_ahead = self._scheduler.requests_ahead(client)
            try:
                evicted = self._scheduler.add(job)
            except queue.Full as error:
                raise RequestError(429, f"{error}; try again later") from None
            if evicted is not None:
                evicted.cancel()
                evicted.put(
                    RequestError(
                        429, "the queue is full and other clients have priority; try later"
                    )
                )
        # The request is queued before it is encoded, which limits concurrent encodings.
        try:
            tokens = self._encode(request)
        except BaseException:  # any error removes the request from the queue
            job.cancel()
            raise
        finally:
            with self._changed:
                if job.cancelled:
                    self._scheduler.remove(job)
                else:
                    job.tokens = tokens
                self._changed.notify_all()
        return job

    def close(self, grace_seconds: float = 0.0) -> None:
        """Refuses new requests, gives accepted ones some time, then cancels the rest."""
        deadline = time.monotonic() + grace_seconds
        with self._changed:
            self._closing = True
            while self._scheduler and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for job in self._scheduler:
                job.cancel()
                job.put(RequestError(503, "the server stopped before the answer was complete"))
                self._scheduler.remove(job)
            self._changed.notify_all()
        self._thread.join(timeout=5.0)

    def _encode(self, request: GenerateRequest) -> list[list[int]]:
        """Returns the tokens of the prompts."""
        try:
            prompts = self._tokenizer.encode_batch(request.prompts)
        except DataError as error:
            raise RequestError(400, f"prompts: {error}") from None
        if request.add_BOS:
            start = self._tokenizer.bos_id
            if start is None:
                raise RequestError(
                    400, "add_BOS: the tokenizer of this model has no begin-of-text token"
                )
            prompts = [[start, *tokens] for tokens in prompts]
        new = request.tokens_to_generate
        for index, tokens in enumerate(prompts):
            if not tokens:
                raise RequestError(400, f"prompts[{index}] has no tokens; it needs at least one")
            if len(tokens) + new > self.positions:
                raise RequestError(
                    400,
                    f"prompts[{index}] has {len(tokens)} tokens, tokens_to_generate is {new}, and "
                    f"the model has {self.positions} positions; use a shorter prompt or generate "
                    "less",
                )
        # The cache has a slot for every prompt, as long as the longest needs.
        longest = max(map(len, prompts))
        held = len(prompts) * (longest + new)
        if held > self._max_tokens:
            raise RequestError(
                400,
                f"prompts of up to {longest} tokens with tokens_to_generate {new} need "
                f"{len(prompts)} * ({longest} + {new}) = {held} tokens, but the limit of a request "
                f"is {self._max_tokens}; send fewer or shorter prompts, or generate less",
            )
        return prompts

    def _work(self) -> None:
        """Processes requests until the service is closed."""
        with evaluating(self._model), torch.no_grad():
            while (job := self._next()) is not None:
                outcome = self._step(job)
                if outcome is not None:
                    with self._changed:
                        self._scheduler.remove(job)
                        job.put(outcome)
                        self._changed.notify_all()

    def _next(self) -> Job | None:
        """Waits for the next request to run; returns None once the service is closed."""
        with self._changed:
            while True:
                self._remove_cancelled()
                self._scheduler.start()
                job = self._scheduler.next_job()
                for gone in self._generations.keys() - set(self._scheduler.running):
                    del self._generations[gone]
                if job is not None or (self._closing and not self._scheduler):
                    return job
                self._changed.wait()

    def _remove_cancelled(self) -> None:
        for job in self._scheduler:
            if job.cancelled:
                self._scheduler.remove(job)

    def _step(self, job: Job) -> Answer | RequestError | None:
        """Runs the model once for a request; returns its answer or error when it ends."""
        try:
            if job not in self._generations:
                self._generations[job] = Generation(
                    self._model, self._tokenizer, job, self._defaults.stop_tokens
                )
            return self._generations[job].step()
        except InferError as error:
            log.error("a generation failed: %s", error)
            return RequestError(500, str(error))
        except Exception as error:  # out of memory or a bug; other requests continue
            if is_out_of_memory(error):
                log.error("a generation ran out of memory")
                return RequestError(503, "out of memory; send fewer or shorter prompts")
            log.exception("a generation failed")
            return RequestError(500, "internal error; see the log of the server")
