"""Allowed schemes of URLs, for paths from a user and for paths from data.

A manifest names the sources of its dataset, and a line of JSON names its image. Such data may come
from an untrusted author. Paths in data may therefore open local files and object storage only: no
scheme that connects to a host in the URL, and none that reads further paths from a file.
"""

from megatron_data.errors import DataError

HTTP_SCHEMES = ("http", "https")
STORAGE_SCHEMES = (
    *("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "msc"),
)
"""Schemes allowed for paths from data."""
SCHEMES = (*STORAGE_SCHEMES, *HTTP_SCHEMES)
"""Schemes allowed for paths from a user."""

_FILE = "file://"


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, which fsspec opens."""
    return "://" in path


def is_local(path: str) -> bool:
    """Returns whether a path is local: not a URL, or a `file://` URL."""
    return not is_url(path) or path.startswith(_FILE)


def without_scheme(path: str) -> str:
    """Returns the path of a `file://` URL; returns other paths and URLs unchanged."""
    return path.removeprefix(_FILE)


def check_scheme(url: str) -> None:
    """Raises an error for a URL with an unknown scheme or a chain of file systems (`a::b`).

    Raises:
        DataError: The scheme is not one of `SCHEMES`, or the URL is a chain.
    """
    scheme = url.partition("://")[0]
    if "::" in url:
        raise DataError(
            f"{url!r:.300}: a chain of file systems ('::') is not supported; give the URL of the "
            "file itself"
        )
    if scheme not in SCHEMES:
        raise DataError(
            f"{url!r:.300}: the scheme {scheme!r:.40} is not supported; give a local path or one "
            f"of {', '.join(f'{name}://' for name in SCHEMES)}"
        )


def check_untrusted_path(name: object, allow_http: bool = False) -> str:
    """Checks a path or URL from data, and returns it.

    Args:
        name: The value in the data.
        allow_http: Whether the user allows URLs of web servers.

    Raises:
        DataError: The value is not text, cannot be a path, or is a URL with another scheme.
    """
    if not isinstance(name, str) or not name or "\0" in name or not _encodable(name):
        raise DataError(f"{name!r:.60} is not a path or URL")
    if is_url(name):
        check_scheme(name)
        if not allow_http and name.partition("://")[0] in HTTP_SCHEMES:
            raise DataError(
                f"{name!r:.300} is named by the data, which may name local files and object "
                "storage only; give --allow-http (in Python allow_http=True) to connect to web "
                "servers that it names"
            )
    return name


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
