"""Checks of the sender of a request: its token, or without one the Host header; and its address."""

import hmac
import ipaddress
import re

from megatron_infer.server.fields import RequestError
from megatron_infer.server.settings import LOOPBACK_NAMES, ServerSettings

OPEN_PATHS = frozenset(["/", "/page.js", "/page.css", "/health"])
"""Paths that need no token. They do not describe the model."""

SCHEME = "Bearer "


def check_credentials(path: str, host: str, authorization: str, settings: ServerSettings) -> None:
    """Checks whether a request may be processed, given its head.

    Args:
        path: The path of the request.
        host: The Host header, or an empty string.
        authorization: The Authorization header, or an empty string; several are joined by commas.
        settings: The settings of the server.

    Raises:
        RequestError: Status 401 if the token is missing or wrong; 403 if the server has no token
            and the Host header names another server.
    """
    if settings.token is None:
        # Prevents DNS rebinding: a page of another site whose name resolves to this machine.
        if not _is_ours(host, settings):
            raise RequestError(403, "the Host header does not name this server; use localhost")
        return
    expected = f"{SCHEME}{settings.token}".encode()
    # Compared in constant time, so that the duration does not reveal a partial match.
    if path not in OPEN_PATHS and not hmac.compare_digest(authorization.encode(), expected):
        raise RequestError(401, "send the header Authorization: Bearer TOKEN")


def client_id(address: str | None) -> str:
    """Returns the identifier of the client of an address, for fair scheduling.

    An IPv6 network (the first 64 bits) is one client, because a single machine usually has all of
    it.
    """
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)


def _is_ours(host: str, settings: ServerSettings) -> bool:
    """Returns whether a Host header, with or without a port, names this machine."""
    name = re.sub(r":[0-9]*\Z", "", host.lower())
    return name in {"", *LOOPBACK_NAMES, settings.host.lower(), f"[{settings.host.lower()}]"}
