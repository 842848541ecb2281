"""Settings of the server. This module does not import torch or Flask."""

import ipaddress
from dataclasses import dataclass, field

from megatron_infer.errors import InferError

SHORTEST_TOKEN = 16
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

RANGES = {
    "max_tokens_per_request": (2, 1 << 40),
    "max_body_bytes": (64, 1 << 30),
    "max_running": (1, 256),
    "max_waiting": (0, 1024),
    "receive_seconds": (1, 3600),
    "grace_seconds": (0, 86400),
}
"""The smallest and largest value of each setting. Every waiting request has a thread."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server.

    Raises InferError if an address that other machines can reach has no token, or if a value is out
    of range.
    """

    host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "address to listen on; one that other machines can reach needs --token-file",
            "flag": "--host",
            "metavar": "ADDRESS",
        },
    )
    port: int = field(
        default=5000,
        metadata={"help": "port to listen on; 0 takes any free port", "flag": "--port"},
    )
    max_tokens_per_request: int = field(
        default=12000,
        metadata={
            "help": "limit for the number of prompts times the sum of the longest prompt and the "
            "new tokens",
            "flag": "--max-tokens-per-request",
        },
    )
    max_body_bytes: int = field(
        default=1 << 20,
        metadata={"help": "largest size of a request body", "flag": "--max-body-bytes"},
    )
    max_running: int = field(
        default=4,
        metadata={
            "help": "largest number of requests that run, taking turns in forward passes; each has "
            "a cache",
            "flag": "--max-running",
        },
    )
    max_waiting: int = field(
        default=64,
        metadata={
            "help": "largest number of requests that wait; more get status 429",
            "flag": "--max-waiting",
        },
    )
    receive_seconds: int = field(
        default=30,
        metadata={
            "help": "seconds within which a request with its body must arrive",
            "flag": "--receive-seconds",
            "unit": "s",
        },
    )
    grace_seconds: int = field(
        default=10,
        metadata={
            "help": "seconds for accepted requests to finish after SIGTERM",
            "flag": "--grace-seconds",
            "unit": "s",
        },
    )
    token: str | None = field(
        default=None, repr=False, metadata={"help": "secret that clients send"}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise InferError(f"--port {self.port}: use 0 (any free port) to 65535")
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                flag = "--" + name.replace("_", "-")
                raise InferError(f"{flag} {getattr(self, name)}: use {least} to {most}")
        if self.token is None and not self.only_this_machine:
            raise InferError(
                f"--host {self.host} can be reached from other machines; give --token-file FILE, "
                "a secret that clients must send, or listen on 127.0.0.1"
            )
        if self.token is not None:
            _check_token(self.token)

    @property
    def only_this_machine(self) -> bool:
        """Whether the address is a loopback address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def threads(self) -> int:
        """The number of threads: one for each request that runs or waits, and a few more.

        The additional threads answer `/health`, pages and refusals when all others are busy.
        """
        return self.max_running + self.max_waiting + 4

    @property
    def connections(self) -> int:
        """The largest number of open connections: those with a request, and as many idle ones."""
        return max(256, 2 * self.threads)


def _check_token(token: str) -> None:
    if len(token) < SHORTEST_TOKEN:
        raise InferError(
            f"the token has {len(token)} characters; use {SHORTEST_TOKEN} or more random ones"
        )
    if not all("!" <= character <= "~" for character in token):
        raise InferError("the token must be printable ASCII without spaces, as in HTTP headers")
