"""Checks of senders: only the exact token and only names of this machine are accepted."""

import pytest
from megatron_infer import ServerSettings
from megatron_infer.server.fields import RequestError
from megatron_infer.server.guard import OPEN_PATHS, check_credentials

TOKEN = "correct-Horse-battery-staple"
GUARDED = ServerSettings(token=TOKEN, host="0.0.0.0")
LOCAL = ServerSettings()

NEARLY = [
    "",
    "Bearer",
    "Bearer ",
    TOKEN,
    f" {TOKEN}",
    f"Basic {TOKEN}",
    f"Token {TOKEN}",
    f"bearer{TOKEN}",
    f"Bearer{TOKEN}",
    f"Bearer: {TOKEN}",
    f"Bearer  {TOKEN}",
    f"Bearer\t{TOKEN}",
    f" Bearer {TOKEN}",
    f"Bearer {TOKEN} ",
    f"Bearer {TOKEN}\t",
    f"Bearer {TOKEN}X",
    f"Bearer X{TOKEN}",
    f"Bearer {TOKEN} X",
    f"Bearer X {TOKEN}",
    f"Bearer {TOKEN}\0",
    f"Bearer {TOKEN}{TOKEN}",
    f"Bearer {TOKEN[:-1]}",
    f"Bearer {TOKEN[1:]}",
    f"Bearer {TOKEN[::-1]}",
    f"Bearer {TOKEN.lower()}",
    f"Bearer {TOKEN.upper()}",
    f"Bearer {TOKEN[:-1]}X",
    f"Bearer X{TOKEN[1:]}",
    f'Bearer "{TOKEN}"',
    f"Bearer {TOKEN}, Bearer {TOKEN}",  # two headers
    f"Bearer X, Bearer {TOKEN}",
    f"Bearer {TOKEN}, Bearer X",
    f"Bearer {TOKEN}; x=1",
    f"Bearer {TOKEN}\xe9",
    f"Bearer {TOKEN.replace('e', chr(0x435))}",
    "Bearer None",
]


@pytest.mark.parametrize("sent", NEARLY, ids=ascii)
def test_tokens_that_are_almost_right_are_refused(sent: str) -> None:
    for path in ("/api", "/info", "/no", "/health/", "/healthy", "/HEALTH", ""):
        with pytest.raises(RequestError, match="send the header Authorization") as refused:
            check_credentials(path, "localhost", sent, GUARDED)
        assert refused.value.status == 401
        assert TOKEN not in str(refused.value)
    for path in OPEN_PATHS:
        check_credentials(path, "localhost", sent, GUARDED)


def test_the_token_is_accepted_with_any_host() -> None:
    for host in ("localhost", "example.org", ""):
        check_credentials("/api", host, f"Bearer {TOKEN}", GUARDED)


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example",
        "localhost.rebound.example",
        "rebound.example:5000",
        "localhost:5000.rebound.example",
        "localhost@rebound.example",
        "rebound.example, localhost",
        "localhost, rebound.example",
        "localhost:5000:5000",
        "localhost:x",
        "localhost:\u0663",
        "localhost:5000\n",
        "localhost ",
        " localhost",
        "localhost.",
        "xlocalhost",
        "127.0.0.1.rebound.example",
        "127.0.0.2",
        "127.0.0.10",
        "1127.0.0.1",
        "0.0.0.0",
        "[::1",
        "::1]",
        "[::2]",
        "[::1]x",
        "null",
    ],
    ids=ascii,
)
def test_foreign_host_names_are_refused_everywhere(host: str) -> None:
    for path in ("/api", "/info", *OPEN_PATHS):
        with pytest.raises(
            RequestError, match="the Host header does not name this server"
        ) as refused:
            check_credentials(path, host, f"Bearer {TOKEN}", LOCAL)
        assert refused.value.status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:5000", "[::1]:5000", "localhost:"]
)
def test_names_of_this_machine_are_accepted_without_a_token(host: str) -> None:
    check_credentials("/api", host, "", LOCAL)


def test_the_listening_address_is_accepted_as_host() -> None:
    for address, host in (
        ("127.0.0.2", "127.0.0.2:5000"),
        ("::1", "[::1]"),
        ("127.1.1.1", "127.1.1.1"),
    ):
        check_credentials("/api", host, "", ServerSettings(host=address))
