"""The queue: order, limits, clients that go away, and the end."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from megatron_data import ByteTokenizer
from megatron_infer import GenerationService, InferError, ServerSettings
from megatron_infer.server.app import server_sent_events
from megatron_infer.server.fields import GenerateRequest, RequestError
from megatron_infer.server.service import Answer, Job, Piece
from megatron_infer.server.settings import RANGES
from megatron_models import GPT

STAY = lambda: False  # noqa: E731


class Gate:
    """Holds every forward pass until it is let through."""

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
        assert gate.passes.acquire(timeout=20)
        gate.count += 1
        return forward(self, *args, **settings)

    monkeypatch.setattr(GPT, "forward", held)
    return gate


@pytest.fixture
def service(make_model: Callable[..., GPT], gate: Gate) -> Iterator[GenerationService]:
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer(), max_waiting=2)
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
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_are_answered_in_order_and_too_many_are_refused(
    service: GenerationService, gate: Gate
) -> None:
    jobs = [service.submit(ask(prompt=prompt)) for prompt in "abc"]
    assert [job.ahead for job in jobs] == [0, 1, 2]
    with pytest.raises(RequestError, match="3 requests came before") as refused:
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
    seen: list[Piece] = []
    for event in job.events(lambda: len(seen) >= 2):
        if isinstance(event, Piece):
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


def test_who_leaves_the_queue_makes_room(service: GenerationService, gate: Gate) -> None:
    jobs = [service.submit(ask()) for _ in range(3)]
    jobs[1].cancel()
    late = service.submit(ask(prompt="z"))
    gate.let(15)
    assert result(jobs[2]).text[0].startswith("a")
    assert result(late).text[0].startswith("z")
    assert gate.count == 15


def test_closing_with_grace_finishes_what_was_accepted(
    service: GenerationService, gate: Gate
) -> None:
    jobs = [service.submit(ask()) for _ in range(2)]
    closing = threading.Thread(target=service.close, args=(20.0,))
    closing.start()
    wait_until(lambda: not service.healthy)
    with pytest.raises(RequestError) as refused:
        service.submit(ask())
    assert refused.value.status == 503
    gate.let(10)
    assert [result(job).finish_reasons for job in jobs] == [["length"], ["length"]]
    closing.join(timeout=10)
    assert not closing.is_alive()


def test_closing_at_once_answers_everybody(service: GenerationService, gate: Gate) -> None:
    jobs = [service.submit(ask()) for _ in range(2)]
    gate.let(1)
    closing = threading.Thread(target=service.close)
    closing.start()
    for job in jobs:
        with pytest.raises(RequestError, match="stopped before the answer") as ended:
            result(job)
        assert ended.value.status == 503
    gate.let(5)
    closing.join(timeout=10)
    assert not closing.is_alive()


def test_a_prompt_that_the_tokenizer_refuses_is_the_clients_mistake(
    make_model: Callable[..., GPT],
) -> None:
    from megatron_data import NullTokenizer

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
        ({"max_body_bytes": 63}, "--max-body-bytes 63: it must lie in 64 to 1073741824"),
        ({"max_tokens_per_request": 1}, "--max-tokens-per-request 1"),
        ({"receive_seconds": 0}, "--receive-seconds 0"),
        ({"port": -1}, "--port -1"),
        *(({name: 10**30}, f"--{name.replace('_', '-')} 10{{30}}") for name in RANGES),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], names: str) -> None:
    with pytest.raises(InferError, match=names):
        ServerSettings(**settings)


def test_addresses_of_this_machine_need_no_token() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert ServerSettings(host=host).only_this_machine
    assert ServerSettings(host="0.0.0.0", token="x" * 16).token == "x" * 16
    assert "x" * 16 not in repr(ServerSettings(token="x" * 16))
