"""How the server listens and what it refuses. Nothing here imports torch or Flask."""

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
"""Least and most of each setting; every request that waits has a thread."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    Raises InferError if an address beyond this machine comes without a token, or a value is out of
    its range.
    """

    host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "address to listen on; any that others can reach needs --token-file",
            "flag": "--host",
            "metavar": "ADDRESS",
        },
    )
    port: int = field(
        default=5000,
        metadata={"help": "port to listen on; 0 takes a free one", "flag": "--port"},
    )
    max_tokens_per_request: int = field(
        default=12000,
        metadata={
            "help": "number of prompts times the longest prompt with what is to be generated",
            "flag": "--max-tokens-per-request",
        },
    )
    max_body_bytes: int = field(
        default=1 << 20,
        metadata={"help": "length of a request's body", "flag": "--max-body-bytes"},
    )
    max_running: int = field(
        default=4,
        metadata={
            "help": "requests that take turns, a forward pass each; each holds memory of its own",
            "flag": "--max-running",
        },
    )
    max_waiting: int = field(
        default=64,
        metadata={
            "help": "requests that may wait while as many as possible run; more get status 429",
            "flag": "--max-waiting",
        },
    )
    receive_seconds: int = field(
        default=30,
        metadata={
            "help": "seconds in which a request, with its body, has to arrive",
            "flag": "--receive-seconds",
            "unit": "s",
        },
    )
    grace_seconds: int = field(
        default=10,
        metadata={
            "help": "seconds that accepted requests have to finish after SIGTERM",
            "flag": "--grace-seconds",
            "unit": "s",
        },
    )
    token: str | None = field(default=None, repr=False, metadata={"help": "secret of the clients"})

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise InferError(f"--port {self.port}: ports are 0 (any free one) to 65535")
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                flag = "--" + name.replace("_", "-")
                raise InferError(f"{flag} {getattr(self, name)}: it must lie in {least} to {most}")
        if self.token is None and not self.only_this_machine:
            raise InferError(
                f"--host {self.host} can be reached from other machines: give --token-file FILE, "
                "a secret that clients have to send, or listen on 127.0.0.1"
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
        """Connections handled at once: all requests that run or wait, and a few more.

        The few answer `/health`, pages and refusals while everything else is full.
        """
        return self.max_running + self.max_waiting + 4

    @property
    def connections(self) -> int:
        """Connections that may be open: those with a request, and as many that wait for one."""
        return max(256, 2 * self.threads)


def _check_token(token: str) -> None:
    if len(token) < SHORTEST_TOKEN:
        raise InferError(
            f"the token has {len(token)} characters; take {SHORTEST_TOKEN} or more random ones"
        )
    if not all("!" <= character <= "~" for character in token):
        raise InferError("the token must be visible ASCII without spaces, as HTTP headers are")
