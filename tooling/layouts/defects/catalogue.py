"""What a planted defect is, and the list of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron_parallel import Mesh
from megatron_train.prove.planting import Plant, Replace, planting

__all__ = ["DEFECTS", "Defect", "Replace", "defect", "planted"]


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


def planted(name: str | None, mesh: Mesh) -> AbstractContextManager[None]:
    """Returns a context in which the defect is planted on this rank; None plants nothing."""
    return planting(None if name is None else DEFECTS[name].plant, mesh)


def defect(name: str, case: str) -> Callable[[Plant], Plant]:
    """Returns a decorator that adds a function to `DEFECTS`."""

    def enter(plant: Plant) -> Plant:
        DEFECTS[name] = Defect(name, case, plant)
        return plant

    return enter
