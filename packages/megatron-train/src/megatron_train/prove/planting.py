"""Replaces functions while a layout trains, to see that a proof finds a defect."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron_parallel import Mesh

Replace = Callable[[object, str, Any], None]
"""Replaces an attribute of a class or module until the end of the training."""

Plant = Callable[[Mesh, Replace], None]
"""Plants a defect on a rank."""


@contextmanager
def planting(plant: Plant | None, mesh: Mesh) -> Iterator[None]:
    """Returns a context in which a defect is planted on this rank; None plants nothing."""
    with ExitStack() as stack:
        if plant is not None:

            def replace(owner: object, attribute: str, new: Any) -> None:
                if attribute in vars(owner):
                    stack.callback(setattr, owner, attribute, vars(owner)[attribute])
                else:
                    stack.callback(delattr, owner, attribute)
                setattr(owner, attribute, new)

            plant(mesh, replace)
        yield
