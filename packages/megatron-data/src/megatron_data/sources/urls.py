"""Which schemes a name may have: one that a user typed, and one that came with data.

A manifest names the sources of its dataset, and a line of JSON names its image. A stranger may
have made them, so such a name opens local files and object storage only: nothing that connects
to a host which the name chooses, and no scheme that reads further names out of what it opens.
"""

from megatron_data.errors import DataError

HTTP_SCHEMES = ("http", "https")
STORAGE_SCHEMES = (
    *("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "msc"),
)
"""Schemes that a name may have which came with data."""
SCHEMES = (*STORAGE_SCHEMES, *HTTP_SCHEMES)
"""Schemes that are opened at all."""


_FILE = "file://"


def is_url(path: str) -> bool:
    """Returns whether fsspec opens this path."""
    return "://" in path


def is_local(path: str) -> bool:
    """Returns whether this is a path, or the `file://` URL of one."""
    return not is_url(path) or path.startswith(_FILE)


def without_scheme(path: str) -> str:
    """Returns the path that a `file://` URL names; any other path or URL as it is."""
    return path.removeprefix(_FILE)


def check_scheme(url: str) -> None:
    """Refuses a URL of another scheme, and one that chains several file systems (`a::b`).

    Raises:
        DataError: its scheme is not one of `SCHEMES`.
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
    """Returns a path or URL that came with data, if such data may name it.

    Args:
        name: what stands there.
        allow_http: whether the user allows it to name a web server.

    Raises:
        DataError: no text, nothing that can be a path, or a URL of another scheme.
    """
    if not isinstance(name, str) or not name or "\0" in name or not _encodable(name):
        raise DataError(f"{name!r:.60} is no path or URL")
    if is_url(name):
        check_scheme(name)
        if not allow_http and name.partition("://")[0] in HTTP_SCHEMES:
            raise DataError(
                f"{name!r:.300} came with the data, which may name local files and object storage; "
                "give --allow-http (in Python allow_http=True) to connect to web servers that it "
                "names"
            )
    return name


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
