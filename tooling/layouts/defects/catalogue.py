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
    """A mistake in one function.

    Attributes:
        name: What is wrong.
        case: Title of the case that finds it.
        plant: Plants it.
    """

    name: str
    case: str
    plant: Plant


DEFECTS: dict[str, Defect] = {}
"""Defects by name; only the name is sent to the ranks."""


@contextmanager
def planted(name: str | None, mesh: Mesh) -> Iterator[None]:
    """Returns a context in which the defect is planted on this rank; None plants nothing."""
    with ExitStack() as stack:
        if name is not None:

            def replace(owner: object, attribute: str, new: Any) -> None:
                stack.enter_context(mock.patch.object(owner, attribute, new))

            DEFECTS[name].plant(mesh, replace)
        yield


def defect(name: str, case: str) -> Callable[[Plant], Plant]:
    """Returns a decorator that adds a function to `DEFECTS`."""

    def enter(plant: Plant) -> Plant:
        DEFECTS[name] = Defect(name, case, plant)
        return plant

    return enter
