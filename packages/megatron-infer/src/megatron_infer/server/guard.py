"""Who sends a request: the token, the Host header where there is none, and the address."""

import hmac
import ipaddress
import re

from megatron_infer.server.fields import RequestError
from megatron_infer.server.settings import LOOPBACK_NAMES, ServerSettings

OPEN_PATHS = frozenset(["/", "/page.js", "/page.css", "/health"])
"""Answered without a token: the page's files, which say nothing about the model, and the health."""

SCHEME = "Bearer "


def check_credentials(path: str, host: str, authorization: str, settings: ServerSettings) -> None:
    """Checks by the head of a request whether it is answered.

    Args:
        path: path of the request.
        host: its Host header, or an empty string.
        authorization: its Authorization header, or an empty string; several are joined by commas.
        settings: of the server.

    Raises:
        RequestError: status 401 if the token is missing or is not exactly the server's; 403 if the
            server has no token and the Host header names another server.
    """
    if settings.token is None:
        # Another site's name that resolves to this machine would make its page one of ours.
        if not _is_ours(host, settings):
            raise RequestError(403, "the Host header is not this server's; ask for localhost")
        return
    expected = f"{SCHEME}{settings.token}".encode()
    # Constant time: how long it takes does not tell how much of a guess is right.
    if path not in OPEN_PATHS and not hmac.compare_digest(authorization.encode(), expected):
        raise RequestError(401, "send the header Authorization: Bearer TOKEN")


def client_id(address: str | None) -> str:
    """Returns the name under which an address shares the model with others.

    A network of IPv6 (the first 64 bits) is one client, because a single machine has all of it.
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
    """Returns whether a Host header, which may end in a port, names this machine."""
    name = re.sub(r":[0-9]*\Z", "", host.lower())
    return name in {"", *LOOPBACK_NAMES, settings.host.lower(), f"[{settings.host.lower()}]"}
