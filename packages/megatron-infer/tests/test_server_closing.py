"""The end of the service: what happens to requests that run or wait, and when."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from megatron_data import ByteTokenizer
from megatron_infer import GenerationService
from megatron_infer.server.fields import RequestError
from megatron_models import GPT

from . import test_server_service
from .test_server_service import Gate, ask, result, wait_until

gate, service = test_server_service.gate, test_server_service.service  # the fixtures


def close(service: GenerationService, grace_seconds: float) -> threading.Thread:
    """Closes a service in another thread, and returns that once the service is closing."""
    closing = threading.Thread(target=service.close, args=(grace_seconds,), daemon=True)
    closing.start()
    wait_until(lambda: not service.healthy)
    return closing


def test_closing_at_once_removes_all_requests_although_a_pass_runs(
    service: GenerationService, gate: Gate
) -> None:
    jobs = [service.submit(ask()) for _ in range(2)]
    wait_until(lambda: bool(service._generations))  # the first pass has begun
    closing = close(service, 0.0)
    wait_until(lambda: all(job.cancelled for job in jobs))
    assert service.unfinished == 0
    gate.let(5)
    closing.join(timeout=60)
    assert not closing.is_alive()


@pytest.mark.parametrize("grace", [0.0, 1.0])
def test_requests_have_exactly_the_given_time_to_finish(
    service: GenerationService, gate: Gate, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    """The clock of the service stands still, so that its time is up only if there is none."""
    clock = SimpleNamespace(monotonic=lambda: 5.0)
    monkeypatch.setattr("megatron_infer.server.service.time", clock)
    job = service.submit(ask(tokens=1))
    closing = close(service, grace)
    gate.let(1)
    if grace:
        assert result(job).finish_reasons == ["length"]
    else:
        with pytest.raises(RequestError, match="stopped before the answer"):
            result(job)
    closing.join(timeout=60)
    assert not closing.is_alive()


def test_the_thread_of_a_service_does_not_keep_the_process(
    make_model: Callable[..., GPT],
) -> None:
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer())
    assert service._thread.daemon
    service.close()
