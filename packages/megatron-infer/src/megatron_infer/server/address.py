"""Taking the server's address. Nothing here imports torch or Flask."""

import errno
import socket

from megatron_infer.errors import InferError
from megatron_infer.server.settings import ServerSettings


def listen(settings: ServerSettings) -> socket.socket:
    """Takes the address, so that a server that cannot have it says so before its model is loaded.

    Raises:
        InferError: the port is in use or not allowed, or the host is none of this machine.
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
            listener.listen()  # two sockets may be bound to one port, but only one listens
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
    known = {
        errno.EADDRINUSE: "the port is in use; give another --port, or 0 for any free one",
        errno.EACCES: "no permission for this port; give a --port above 1023",
        errno.EADDRNOTAVAIL: "the address is none of this machine; give another --host",
    }
    return known.get(error.errno or 0, str(error.strerror or error))
