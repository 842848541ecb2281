"""Binding of the server's address. This module does not import torch or Flask."""

import errno
import socket

from megatron_infer.errors import InferError
from megatron_infer.server.settings import ServerSettings


def listen(settings: ServerSettings) -> socket.socket:
    """Binds and listens on the address, so that a conflict is reported before the model is loaded.

    Raises:
        InferError: The port is in use or not permitted, or the host is not an address of this
            machine.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # two sockets may bind one port, but only one can listen
        except OSError:
            listener.close()
            raise
    except socket.gaierror as error:
        raise InferError(
            f"--host {settings.host} is not an address: {error.args[1]}; use one of this machine"
        ) from None
    except OSError as error:
        raise InferError(f"cannot listen on {where}: {_reason(error)}") from None
    return listener


def _reason(error: OSError) -> str:
    advice: dict[int | None, str] = {
        errno.EADDRINUSE: "the port is in use; use another --port, or 0 for any free port",
        errno.EACCES: "no permission for this port; use a --port above 1023",
        errno.EADDRNOTAVAIL: "the address does not belong to this machine; use another --host",
    }
    return advice.get(error.errno, str(error.strerror or error))
