"""``megatron-infer serve``: an HTTP server for a model."""

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer._command import Parser
from megatron_infer.cli.options import add_model_options, load_decoder_only
from megatron_infer.errors import InferError
from megatron_infer.server.settings import ServerSettings

if TYPE_CHECKING:
    from megatron_infer.load import LoadedModel


def add_parser(commands: Any) -> None:
    """Adds the command ``serve``."""
    parser: Parser = commands.add_parser(
        "serve",
        help="serve the model of a checkpoint over HTTP",
        description="Serve the model of a checkpoint over HTTP: PUT /api like Megatron-LM's text "
        "generation server, a page for trying the model at /, and an OpenAPI document at "
        "/openapi.json.",
    )
    parser.set_defaults(run=run)
    add_model_options(parser)
    server = parser.add_argument_group("server")
    for setting in _settings():
        server.add_argument(
            setting.metadata["flag"],
            dest=setting.name,
            type=int if setting.type is int else str,
            default=setting.default,
            metavar=setting.metadata.get("metavar", "N"),
            help=setting.metadata["help"],
        )
    server.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with a secret of at least 16 characters, which clients must send in the header "
        "Authorization: Bearer SECRET",
    )
    server.add_argument("--quiet", action="store_true", help="do not log requests")


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    token = _read_token(arguments.token_file) if arguments.token_file else None
    values = {setting.name: getattr(arguments, setting.name) for setting in _settings()}
    settings = ServerSettings(**values, token=token)

    from megatron_infer.server.address import listen

    listener = listen(settings)
    with listener:
        loaded = load_decoder_only(arguments)

        from megatron_infer.server.app import create_app
        from megatron_infer.server.run import serve
        from megatron_infer.server.service import GenerationService

        if "max_new_tokens" in loaded.defaults.params:
            print(
                "megatron-infer: note: a request without tokens_to_generate gets 64 tokens; "
                "max_new_tokens of the model is not applied",
                file=sys.stderr,
            )
        _log_to_stderr(logging.WARNING if arguments.quiet else logging.INFO)
        service = GenerationService(
            loaded.model,
            loaded.tokenizer,
            max_tokens_per_request=settings.max_tokens_per_request,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            defaults=loaded.defaults,
        )
        app = create_app(service, settings, describe(loaded))
        serve(app, service, settings, listener, on_ready=lambda url: _announce(url, loaded))
    print("megatron-infer: stopped", file=sys.stderr)
    return 0


def describe(loaded: "LoadedModel[Any]") -> dict[str, Any]:
    """Returns the response of `/info`, which has no path of this machine."""
    from megatron_models import parameter_count

    config = loaded.model.config
    parameter = next(loaded.model.parameters())
    return {
        "model": loaded.name,
        "parameters": parameter_count(config),
        "positions": config.embedding.max_position_embeddings,
        "vocabulary": config.embedding.vocab_size,
        "device": str(parameter.device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
    }


def _settings() -> list["dataclasses.Field[Any]"]:
    return [one for one in dataclasses.fields(ServerSettings) if "flag" in one.metadata]


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise InferError(f"--token-file {path}: the token must be ASCII") from None
    if not token:
        raise InferError(f"--token-file {path} is empty; write a secret into it")
    return token


def _log_to_stderr(level: int) -> None:
    logger = logging.getLogger("megatron_infer.server")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _announce(url: str, loaded: "LoadedModel[Any]") -> None:
    print(
        f"megatron-infer: serving {loaded.checkpoint.path} on {loaded.model.mesh.device} at {url} "
        "(Ctrl-C stops)",
        file=sys.stderr,  # which is written line by line
    )
