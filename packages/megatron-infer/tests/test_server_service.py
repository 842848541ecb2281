"""The service: order, limits, clients that disconnect, and closing."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from megatron_data import ByteTokenizer
from megatron_infer import GenerationService, InferError, ServerSettings
from megatron_infer.engine.batch import Batch
from megatron_infer.server.app import server_sent_events
from megatron_infer.server.fields import GenerateRequest, RequestError
from megatron_infer.server.job import Answer, Job, TextDelta
from megatron_infer.server.settings import RANGES
from megatron_models import GPT

STAY = lambda: False  # noqa: E731


class Gate:
    """Blocks every forward pass until it is released."""

    def __init__(self) -> None:
        self.passes = threading.Semaphore(0)
        self.count = 0

    def let(self, passes: int) -> None:
        for _ in range(passes):
            self.passes.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, forward = Gate(), GPT.forward

    def held(self: GPT, *args: object, **settings: object) -> torch.Tensor:
        assert gate.passes.acquire(timeout=60)
        gate.count += 1
        return forward(self, *args, **settings)

    monkeypatch.setattr(GPT, "forward", held)
    return gate


@pytest.fixture
def service(make_model: Callable[..., GPT], gate: Gate) -> Iterator[GenerationService]:
    service = GenerationService(
        make_model(vocab_size=257), ByteTokenizer(), max_running=1, max_waiting=2
    )
    yield service
    gate.let(200)
    service.close()


def ask(tokens: int = 5, prompt: str = "a") -> GenerateRequest:
    return GenerateRequest((prompt,), tokens_to_generate=tokens, random_seed=1)


def result(job: Job) -> Answer:
    *_, last = (event for event in job.events(STAY) if event is not None)
    assert isinstance(last, Answer)
    return last


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_are_processed_in_order_and_too_many_are_refused(
    service: GenerationService, gate: Gate
) -> None:
    jobs = [service.submit(ask(prompt=prompt)) for prompt in "abc"]
    assert [job.requests_ahead for job in jobs] == [0, 1, 2]
    with pytest.raises(RequestError, match="3 requests are running or waiting") as refused:
        service.submit(ask())
    assert refused.value.status == 429
    gate.let(15)
    answers = [result(job) for job in jobs]
    assert [answer.text[0][0] for answer in answers] == ["a", "b", "c"]
    wait_until(lambda: service.unfinished == 0)
    gate.let(5)
    assert result(service.submit(ask(prompt="a"))) == answers[0]


def test_a_client_that_goes_away_stops_its_generation(
    service: GenerationService, gate: Gate
) -> None:
    job, following = service.submit(ask(tokens=40)), service.submit(ask(tokens=2))
    gate.let(3)
    seen: list[TextDelta] = []
    for event in job.events(lambda: len(seen) >= 2):
        if isinstance(event, TextDelta):
            seen.append(event)
    gate.let(3)
    assert result(following).finish_reasons == ["length"]
    assert gate.count <= 6  # of 40 + 2
    assert job.cancelled


def test_a_client_that_closes_the_stream_stops_its_generation(
    service: GenerationService, gate: Gate
) -> None:
    job = service.submit(ask(tokens=40))
    events = job.events(STAY)
    gate.let(2)
    next(events)
    events.close()
    assert job.cancelled
    gate.let(1)
    wait_until(lambda: service.unfinished == 0)
    assert gate.count <= 3


def test_a_client_that_leaves_before_any_text_stops_its_generation(
    service: GenerationService, gate: Gate
) -> None:
    job = service.submit(ask(tokens=40))
    stream = server_sent_events(job, STAY)
    assert next(stream).startswith("event: waiting")
    stream.close()
    assert job.cancelled


def test_a_cancelled_request_frees_its_slot(service: GenerationService, gate: Gate) -> None:
    jobs = [service.submit(ask()) for _ in range(3)]
    jobs[1].cancel()
    late = service.submit(ask(prompt="z"))
    gate.let(15)
    assert result(jobs[2]).text[0].startswith("a")
    assert result(late).text[0].startswith("z")
    assert gate.count == 15


def test_the_memory_of_requests_that_ended_or_were_cancelled_is_free(
    service: GenerationService, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Batch]] = []
    begin = Batch.__init__

    def note(self: Batch, *arguments: object, **settings: object) -> None:
        made.append(weakref.ref(self))
        begin(self, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Batch, "__init__", note)
    ended = service.submit(ask(tokens=2))
    gate.let(2)
    assert result(ended).finish_reasons == ["length"]
    gone = service.submit(ask(tokens=40))
    gate.let(1)
    wait_until(lambda: gate.count == 3)
    gone.cancel()
    gate.let(1)
    wait_until(lambda: service.unfinished == 0)
    wait_until(lambda: gc.collect() >= 0 and [each() for each in made] == [None, None])


def test_a_closed_service_has_no_thread(make_model: Callable[..., GPT]) -> None:
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer())
    service.close()
    assert not service._thread.is_alive()


@pytest.fixture
def shared(make_model: Callable[..., GPT], gate: Gate) -> Iterator[GenerationService]:
    """Returns a service with the defaults of the command: several requests take turns."""
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer())
    yield service
    for job in service._scheduler:
        job.cancel()
    gate.let(400)
    service.close()


def test_a_short_request_does_not_wait_for_a_long_one(
    shared: GenerationService, gate: Gate
) -> None:
    long = shared.submit(ask(tokens=47), "long")
    gate.let(3)
    wait_until(lambda: gate.count == 3)
    short = shared.submit(ask(tokens=5), "short")
    assert short.requests_ahead == 0
    gate.let(11)  # one pass is running, then every second one
    assert result(short).finish_reasons == ["length"]
    assert not long.cancelled
    assert shared.unfinished == 1
    assert gate.count <= 15


def test_a_client_with_many_long_requests_has_the_same_share(
    shared: GenerationService, gate: Gate
) -> None:
    greedy = []
    with pytest.raises(RequestError, match="68 requests are running or waiting"):
        while True:
            greedy.append(shared.submit(ask(tokens=40), "greedy"))
    assert len(greedy) == 68
    gate.let(5)
    wait_until(lambda: gate.count == 5)
    patient = shared.submit(ask(tokens=5), "patient")
    gate.let(11)
    assert result(patient).finish_reasons == ["length"]
    assert gate.count <= 17
    assert greedy[-1].cancelled
    with pytest.raises(RequestError, match="other clients have priority") as refused:
        result(greedy[-1])
    assert refused.value.status == 429
    assert not any(job.cancelled for job in greedy[:-1])


def test_50_clients_are_served_in_order(
    make_model: Callable[..., GPT], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    put = Job.put

    def note(self: Job, event: object) -> None:
        if isinstance(event, Answer):
            ended.append(self.client)
        put(self, event)

    monkeypatch.setattr(Job, "put", note)
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer())
    jobs = [service.submit(ask(tokens=2), f"{number:02}") for number in range(50)]
    gate.let(100)
    for job in jobs:
        assert result(job).finish_reasons == ["length"]
    service.close()
    assert ended == sorted(ended)
    assert gate.count == 100  # and no further pass


def test_concurrent_requests_equal_single_ones(
    make_model: Callable[..., GPT],
) -> None:
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer())
    requests = [
        GenerateRequest(("One", "Three"), tokens_to_generate=9, random_seed=5, logprobs=True),
        GenerateRequest(("Two",), tokens_to_generate=20, top_k=1),
        GenerateRequest(("Scored", "only"), tokens_to_generate=0, logprobs=True),
        GenerateRequest(("Four",), tokens_to_generate=12, random_seed=2**53 - 1, top_p=0.8),
    ]
    alone = [result(service.submit(request)) for request in requests]
    jobs = [service.submit(request, str(place)) for place, request in enumerate(requests * 3)]
    assert [result(job) for job in jobs] == alone * 3
    service.close()


def allocate_on_the_host() -> None:
    torch.empty(2**60)


def allocate_on_a_device() -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("allocate", [allocate_on_the_host, allocate_on_a_device])
def test_a_failed_request_does_not_end_concurrent_ones(
    shared: GenerationService,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    allocate: Callable[[], None],
) -> None:
    job = shared.submit(ask(tokens=8), "a")
    gate.let(2)
    wait_until(lambda: gate.count == 2)
    real = Batch.step

    def fail(self: Batch) -> None:
        if len(self.tokens) == 2:
            allocate()
        real(self)

    monkeypatch.setattr(Batch, "step", fail)
    other = shared.submit(GenerateRequest(("a", "b"), tokens_to_generate=3), "b")
    gate.let(8)
    with pytest.raises(RequestError, match="out of memory") as failed:
        result(other)
    assert failed.value.status == 503
    assert result(job).finish_reasons == ["length"]
    assert gate.count == 8


def test_a_prompt_that_is_refused_leaves_the_queue(shared: GenerationService, gate: Gate) -> None:
    for _ in range(100):
        with pytest.raises(RequestError, match="48 positions"):
            shared.submit(ask(prompt="x" * 48, tokens=1))
    assert shared.unfinished == 0


def test_the_token_limit_counts_padded_prompts(
    make_model: Callable[..., GPT],
) -> None:
    service = GenerationService(
        make_model(vocab_size=257), ByteTokenizer(), max_tokens_per_request=96
    )
    fits = GenerateRequest(("x" * 20, "y", "z"), tokens_to_generate=12, random_seed=1)
    assert len(result(service.submit(fits)).tokens[0]) == 32
    for over in (
        GenerateRequest(("x" * 20, "y", "z"), tokens_to_generate=13),
        GenerateRequest(("x" * 21, "y", "z"), tokens_to_generate=12),
        GenerateRequest(("x" * 20, "y", "z", "z"), tokens_to_generate=12),
    ):
        with pytest.raises(RequestError, match="but the limit of a request is 96") as refused:
            service.submit(over)
        assert refused.value.status == 400
    service.close()


def test_closing_with_grace_finishes_what_was_accepted(
    service: GenerationService, gate: Gate
) -> None:
    jobs = [service.submit(ask()) for _ in range(2)]
    closing = threading.Thread(target=service.close, args=(1000.0,))  # ends with the last one
    closing.start()
    wait_until(lambda: not service.healthy)
    with pytest.raises(RequestError) as refused:
        service.submit(ask())
    assert refused.value.status == 503
    gate.let(10)
    assert [result(job).finish_reasons for job in jobs] == [["length"], ["length"]]
    closing.join(timeout=60)
    assert not closing.is_alive()


def test_closing_at_once_answers_all_clients(service: GenerationService, gate: Gate) -> None:
    jobs = [service.submit(ask()) for _ in range(2)]
    gate.let(1)
    closing = threading.Thread(target=service.close)
    closing.start()
    for job in jobs:
        with pytest.raises(RequestError, match="stopped before the answer") as ended:
            result(job)
        assert ended.value.status == 503
    gate.let(5)
    closing.join(timeout=60)
    assert not closing.is_alive()


def test_the_model_is_in_eval_mode_once_for_all_passes(
    make_model: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(vocab_size=257).train()
    model.final_norm.eval()
    modes: list[tuple[bool, bool]] = []
    walks: list[GPT] = []
    forward, put_in_eval = GPT.forward, GPT.eval

    def noted(self: GPT, *args: object, **settings: object) -> torch.Tensor:
        modes.append((self.training, torch.is_grad_enabled()))
        return forward(self, *args, **settings)

    def counted(self: GPT) -> GPT:
        walks.append(self)
        return put_in_eval(self)

    monkeypatch.setattr(GPT, "forward", noted)
    monkeypatch.setattr(GPT, "eval", counted)
    service = GenerationService(model, ByteTokenizer())
    for _ in range(2):
        result(service.submit(ask(tokens=3)))
    service.close(grace_seconds=60.0)
    assert modes == [(False, False)] * 6
    assert len(walks) == 1
    assert model.training and model.layers["0"].training
    assert not model.final_norm.training


def test_a_prompt_that_the_tokenizer_refuses_gets_status_400(
    make_model: Callable[..., GPT],
) -> None:
    from megatron_data.tokenizers import NullTokenizer

    service = GenerationService(make_model(), NullTokenizer(60))
    with pytest.raises(RequestError, match="prompts: NullTokenizer reads numbers") as refused:
        service.submit(ask(prompt="no number"))
    assert refused.value.status == 400
    with pytest.raises(RequestError, match=r"prompts\[0\] has no tokens"):
        service.submit(ask(prompt=" "))
    service.close()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"host": "0.0.0.0"}, "--token-file"),
        ({"host": "::"}, "--token-file"),
        ({"host": "192.168.0.1"}, "--token-file"),
        ({"host": "example.org"}, "--token-file"),
        ({"token": "short"}, "16 or more"),
        ({"token": "with space in the middle"}, "without spaces"),
        ({"port": 65536}, "--port 65536"),
        ({"max_waiting": -1}, "--max-waiting -1"),
        ({"max_body_bytes": 63}, "--max-body-bytes 63: use 64 to 1073741824"),
        ({"max_tokens_per_request": 1}, "--max-tokens-per-request 1"),
        ({"receive_seconds": 0}, "--receive-seconds 0"),
        ({"port": -1}, "--port -1"),
        *(({name: 10**30}, f"--{name.replace('_', '-')} 10{{30}}") for name in RANGES),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], names: str) -> None:
    with pytest.raises(InferError, match=names):
        ServerSettings(**settings)


def test_addresses_of_this_machine_need_no_token() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert ServerSettings(host=host).only_this_machine
    assert ServerSettings(host="0.0.0.0", token="x" * 16).token == "x" * 16
    assert "x" * 16 not in repr(ServerSettings(token="x" * 16))


@pytest.mark.parametrize("name", RANGES)
def test_settings_are_accepted_exactly_within_their_range(name: str) -> None:
    least, most = RANGES[name]
    for value in (least, most):
        assert getattr(ServerSettings(**{name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(InferError, match=f"use {least} to {most}"):
            ServerSettings(**{name: value})
