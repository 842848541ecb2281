"""Import of objects named by ``package.module:name``."""

import pkgutil
from typing import Any

from megatron_models.errors import ConfigError


def import_object(name: str, referrer: str) -> Any:
    """Returns the object that ``package.module:name`` names.

    Args:
        name: Name of the object.
        referrer: The setting that names it, for the message.

    Raises:
        ConfigError: The module or object does not exist.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{referrer} is {name!r}, which cannot be imported: {error}; give package.module:name"
        ) from error
