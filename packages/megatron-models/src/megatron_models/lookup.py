"""Objects that descriptions name by ``package.module:name``, imported when they are needed."""

import pkgutil
from typing import Any

from megatron_models.errors import ConfigError


def look_up(name: str, said_by: str) -> Any:
    """Returns what ``package.module:name`` names.

    Args:
        name: of the object.
        said_by: what names it, for the message.

    Raises:
        ConfigError: there is no such module or object.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{said_by} is {name!r}, which cannot be imported: {error}; give package.module:name"
        ) from error
