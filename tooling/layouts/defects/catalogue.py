"""What a planted defect is, and the list of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megatron_parallel import Mesh

Replace = Callable[[object, str, Any], None]
Plant = Callable[[Mesh, Replace], None]


@dataclass(frozen=True)
class Defect:
    """A mistake in one place.

    Attributes:
        name: what is wrong.
        case: title of the case that shows it.
        plant: puts it in place.
    """

    name: str
    case: str
    plant: Plant


DEFECTS: dict[str, Defect] = {}
"""By name. They travel to the ranks by name, too."""


@contextmanager
def planted(name: str | None, mesh: Mesh) -> Iterator[None]:
    """While entered, the defect is in place on this rank; None plants nothing."""
    with ExitStack() as stack:
        if name is not None:

            def replace(owner: object, attribute: str, new: Any) -> None:
                stack.enter_context(mock.patch.object(owner, attribute, new))

            DEFECTS[name].plant(mesh, replace)
        yield


def defect(name: str, case: str) -> Callable[[Plant], Plant]:
    """Enter a function into `DEFECTS`."""

    def enter(plant: Plant) -> Plant:
        DEFECTS[name] = Defect(name, case, plant)
        return plant

    return enter
