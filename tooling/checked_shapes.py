"""Run-time checks of shape annotations for the tests of a package."""

from collections.abc import Sequence

from jaxtyping import install_import_hook


def check_shapes(modules: Sequence[str]) -> None:
    """Lets beartype check the jaxtyping annotations of modules that are imported from now on.

    jaxtyping 0.3.11 names the bytecode of these modules, and of all that they import, after the
    expression of the checker. Without the modules in it, sessions that check different modules read
    each other's bytecode (findings/jaxtyping-hook-shared-bytecode.sh).

    Args:
        modules: Names of modules and packages.
    """
    named = tuple(sorted(modules))
    install_import_hook(named, f"beartype.__dict__['beartype' if {named!r} else '']")
