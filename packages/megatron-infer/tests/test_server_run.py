"""A server in this process: its address, its signals, and what is left after its end."""

import contextlib
import gc
import inspect
import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from megatron_data import ByteTokenizer
from megatron_infer import GenerationService, InferError, ServerSettings, create_app, listen
from megatron_infer.server import run
from megatron_infer.server.run import _flush, serve
from megatron_models import GPT


@pytest.fixture
def service(make_model: Callable[..., GPT]) -> Iterator[GenerationService]:
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer())
    yield service
    service.close()


def run_until(service: GenerationService, number: int, host: str = "127.0.0.1") -> str:
    """Serves until the server gets a signal right after it is ready; returns its URL."""
    settings = ServerSettings(host=host, port=0)
    urls = []

    def stop(url: str) -> None:
        urls.append(url)
        os.kill(os.getpid(), number)

    with listen(settings) as listener:
        port = listener.getsockname()[1]
        try:
            serve(create_app(service, settings), service, settings, listener, on_ready=stop)
        finally:
            (url,) = urls
            assert url == f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return url


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_leaves_nothing_behind(
    service: GenerationService, number: int
) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            run_until(service, number)
    else:
        run_until(service, number)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    assert not service.healthy
    names = {one.name for one in threading.enumerate()}
    end = time.monotonic() + 60
    while "waitress" in names and time.monotonic() < end:
        time.sleep(0.01)
        names = {one.name for one in threading.enumerate()}
    assert "waitress" not in names
    # Waiting requests are normal for this server and have their own limit.
    assert not logging.getLogger("waitress.queue").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    ("numbers", "grace"),
    [
        ([signal.SIGTERM], 7.0),
        ([signal.SIGINT], 0.0),
        ([signal.SIGTERM, signal.SIGINT], 0.0),
        ([signal.SIGTERM, signal.SIGTERM], 7.0),
    ],
)
def test_requests_end_before_responses_are_sent_and_sockets_closed(
    service: GenerationService,
    monkeypatch: pytest.MonkeyPatch,
    numbers: list[signal.Signals],
    grace: float,
) -> None:
    """After Ctrl-C, also as a second signal, no time of grace is given."""
    steps: list[object] = []

    def noted(do: Callable[[Any], None]) -> Callable[[Any], None]:
        def note(server: Any) -> None:
            steps.append(do.__name__)
            do(server)

        return note

    monkeypatch.setattr(run, "_flush", noted(run._flush))
    monkeypatch.setattr(run, "_close", noted(run._close))
    settings = ServerSettings(port=0, grace_seconds=7)

    def stop(url: str) -> None:
        threads = {one.name: one.daemon for one in threading.enumerate()}
        assert threads["waitress"]  # it does not keep the process
        for number in numbers:
            signal.raise_signal(number)

    monkeypatch.setattr(service, "close", steps.append)
    interrupted = signal.SIGINT in numbers
    ends: Any = pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext()
    with listen(settings) as listener, ends:
        serve(Flask("app"), service, settings, listener, on_ready=stop)
    assert steps == [grace, "_flush", "_close"]


def test_the_url_of_an_ipv6_address_has_brackets(service: GenerationService) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert run_until(service, signal.SIGTERM, "::1").startswith("http://[::1]:")


@pytest.mark.parametrize("busy", [{"requests": [1]}, {"total_outbufs_len": 9}])
def test_a_server_ends_after_its_responses_are_sent(busy: dict[str, object]) -> None:
    idle = {"requests": [], "total_outbufs_len": 0}
    channels = {1: SimpleNamespace(**idle), 2: SimpleNamespace(**{**idle, **busy})}
    sent = threading.Timer(0.1, lambda: vars(channels[2]).update(idle))
    started = time.monotonic()
    sent.start()
    _flush(SimpleNamespace(active_channels=channels))
    assert 0.1 <= time.monotonic() - started < 1.5


def test_a_client_that_never_reads_does_not_hold_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_infer.server.run.FLUSH_SECONDS", 0.05)
    channels = {1: SimpleNamespace(requests=[], total_outbufs_len=9)}
    started = time.monotonic()
    _flush(SimpleNamespace(active_channels=channels))
    assert time.monotonic() - started < 1.0


def test_a_port_can_be_used_again_at_once() -> None:
    """The connection that the server closed first is in the state TIME_WAIT."""
    settings = ServerSettings(port=0)
    with listen(settings) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
    listen(ServerSettings(port=port)).close()


def test_a_socket_that_cannot_listen_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        with pytest.raises(InferError, match=r"127\.0\.0\.1:.*: the port is in use"):
            listen(ServerSettings(port=other.getsockname()[1]))
        gc.collect(1)
    assert [one.message for one in w if one.category is ResourceWarning] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "no address", "token": "x" * 16}, "--host no address is not an address: "),
        ({"host": "192.0.2.1", "token": "x" * 16}, "192.0.2.1:5000: the address does not belong"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InferError, match=message):
        listen(ServerSettings(**settings))


def test_the_limits_of_settings_are_the_documented_ones() -> None:
    for name, least, most in (
        ("max_tokens_per_request", 2, 1099511627776),
        ("max_body_bytes", 64, 1073741824),
        ("max_running", 1, 256),
        ("max_waiting", 0, 1024),
        ("receive_seconds", 1, 3600),
        ("grace_seconds", 0, 86400),
        ("port", 0, 65535),
    ):
        for value in (least, most):
            assert getattr(ServerSettings(**{name: value}), name) == value
        for value in (least - 1, most + 1):
            with pytest.raises(InferError, match=f"--{name.replace('_', '-')} {value}: use "):
                ServerSettings(**{name: value})


@pytest.mark.parametrize("character", ["!", "~", "a", "0"])
def test_a_token_has_16_printable_characters_or_more(character: str) -> None:
    assert ServerSettings(token=character * 16).token == character * 16
    with pytest.raises(InferError, match="the token has 15 characters; use 16 or more"):
        ServerSettings(token=character * 15)


@pytest.mark.parametrize("character", [" ", "\x7f", "\n", "é"])
def test_a_token_has_no_character_that_headers_cannot_carry(character: str) -> None:
    with pytest.raises(InferError, match="printable ASCII without spaces"):
        ServerSettings(token="x" * 15 + character)


@pytest.mark.parametrize(("running", "waiting"), [(4, 64), (1, 0), (256, 1024), (100, 24)])
def test_every_request_has_a_thread_and_a_connection_and_others_are_left(
    running: int, waiting: int
) -> None:
    settings = ServerSettings(max_running=running, max_waiting=waiting)
    assert settings.threads == running + waiting + 4
    assert settings.connections == max(256, 2 * (running + waiting + 4))


def test_a_service_has_the_limits_of_the_settings_by_default() -> None:
    defaults = inspect.signature(GenerationService).parameters
    settings = ServerSettings()
    for name in ("max_tokens_per_request", "max_running", "max_waiting"):
        assert defaults[name].default == getattr(settings, name)
