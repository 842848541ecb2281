"""Objects that descriptions name by ``package.module:name``, imported when they are needed."""

import pkgutil
from typing import Any

from megatron_models.errors import ConfigError


def import_object(name: str, referrer: str) -> Any:
    """Returns what ``package.module:name`` names.

    Args:
        name: of the object.
        referrer: what names it, for the message.

    Raises:
        ConfigError: there is no such module or object.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{referrer} is {name!r}, which cannot be imported: {error}; give package.module:name"
        ) from error
