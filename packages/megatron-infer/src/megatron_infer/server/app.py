"""The routes: a Flask application that uses a `GenerationService`."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException

from megatron_infer.server.fields import GenerateRequest, RequestError, parse_request
from megatron_infer.server.guard import check_credentials, client_id
from megatron_infer.server.job import Answer, Job, TextDelta
from megatron_infer.server.openapi import openapi_document
from megatron_infer.server.service import GenerationService
from megatron_infer.server.settings import ServerSettings

log = logging.getLogger("megatron_infer.server")

PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
"""The path, file and media type of each file of the page. The files do not describe the model."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
RETRY_SECONDS = 5
QUIET_SECONDS = 10.0
"""Seconds without an event after which a stream sends a comment, so that proxies keep it open."""


def create_app(
    service: GenerationService, settings: ServerSettings, info: dict[str, Any] | None = None
) -> Flask:
    """Builds the WSGI application.

    Args:
        service: The service that generates text.
        settings: The limits, and the token that clients must send.
        info: The response of `/info`. Defaults to an empty object.

    Returns:
        An application for any WSGI server with threads. It detects that a client has disconnected
        if the server sets ``waitress.client_disconnected`` in the environment or closes the
        response.
    """
    app = Flask("megatron_infer", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    _add_guards(app, settings)
    _add_page(app)
    document = openapi_document(
        service.positions,
        needs_token=settings.token is not None,
        defaults=service.request_defaults,
    )
    schema = document["components"]["schemas"]["Request"]

    @app.put("/api")
    def generate() -> Response:
        job = service.submit(_read_request(schema), client_id(request.remote_addr))
        for event in job.events(_client_is_gone()):
            if isinstance(event, Answer):
                return _json(event.to_json())
        return _json({"message": "the client disconnected"}, 503)  # not read by the client

    @app.post("/api/stream")
    def stream() -> Response:
        job = service.submit(_read_request(schema), client_id(request.remote_addr))
        events = server_sent_events(job, _client_is_gone())
        return Response(events, mimetype="text/event-stream", headers={"X-Accel-Buffering": "no"})

    @app.get("/info")
    def about() -> Response:
        return _json(info or {})

    @app.get("/openapi.json")
    def openapi() -> Response:
        return _json(document)

    @app.get("/health")
    def health() -> Response:
        if service.healthy:
            return _json({"status": "ok"})
        return _json({"status": "stopping"}, 503)

    return app


def _read_request(schema: dict[str, Any]) -> GenerateRequest:
    if request.mimetype != "application/json":
        raise RequestError(415, "the content type must be application/json")
    parsed = parse_request(request.get_data(cache=False), schema)
    prompts = len(parsed.prompts)
    g.note = f", {prompts} {'prompt' if prompts == 1 else 'prompts'}"
    return parsed


def server_sent_events(job: Job, client_is_gone: Callable[[], bool]) -> Iterator[str]:
    """Yields the server-sent events of a job for `/api/stream`, each with one data line."""
    last = time.monotonic()
    try:
        yield _event("waiting", {"ahead": job.requests_ahead})
        for event in job.events(client_is_gone):
            if event is None and time.monotonic() - last < QUIET_SECONDS:
                continue
            last = time.monotonic()
            if event is None:
                yield ": still here\n\n"
            elif isinstance(event, TextDelta):
                yield _event("text", vars(event))
            else:
                yield _event("done", event.to_json())
    except RequestError as error:
        yield _event("failed", {"message": str(error)})
    finally:
        job.cancel()  # closing the response cancels the request


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _client_is_gone() -> Callable[[], bool]:
    gone: Callable[[], bool] = request.environ.get("waitress.client_disconnected", lambda: False)
    return gone


def _add_page(app: Flask) -> None:
    """Adds the routes of the files of the page, which are read once."""
    folder = resources.files("megatron_infer.server") / "static"
    for path, (name, kind) in PAGE.items():
        content = (folder / name).read_text(encoding="utf-8")

        def send(content: str = content, kind: str = kind) -> Response:
            return Response(content, mimetype=kind)

        app.add_url_rule(path, endpoint=name, view_func=send, methods=["GET"])


def _add_guards(app: Flask, settings: ServerSettings) -> None:
    """Checks the token, reports every error as JSON, and logs each request without its content."""

    @app.before_request
    def check() -> None:
        g.started = time.perf_counter()
        headers = request.headers
        host, sent = headers.get("Host", ""), headers.get("Authorization", "")
        check_credentials(request.path, host, sent, settings)

    @app.errorhandler(RequestError)
    def refuse(error: RequestError) -> Response:
        response = _json({"message": str(error)}, error.status)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if error.status == 429:
            response.headers["Retry-After"] = str(RETRY_SECONDS)
        return response

    @app.errorhandler(HTTPException)
    def explain(error: HTTPException) -> Response:
        status = error.code or 500
        if status == 404:
            message = "this path does not exist; GET /openapi.json lists all paths"
        elif status == 405:
            allowed = ", ".join(sorted(getattr(error, "valid_methods", None) or []))
            message = f"{request.method} is not allowed here; allowed: {allowed}"
        elif status == 413:
            message = f"the body is longer than {settings.max_body_bytes} bytes"
        else:
            message = " ".join((error.description or error.name).split())
        response = _json({"message": message}, status)
        if status == 405:
            response.headers["Allow"] = allowed
        return response

    @app.errorhandler(Exception)
    def fail(error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return _json({"message": "internal error; see the log of the server"}, 500)

    @app.after_request
    def finish(response: Response) -> Response:
        response.headers.update(HEADERS)
        seconds = time.perf_counter() - g.get("started", time.perf_counter())
        log.info(
            "%s %s %d, %.2f s%s",
            request.method,
            ascii(request.path)[1:-1],
            response.status_code,
            seconds,
            g.get("note", ""),
        )
        return response


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value) + "\n", status=status, mimetype="application/json")
