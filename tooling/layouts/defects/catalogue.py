"""What a planted defect is, and the list of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_parallel import Mesh
from megatron_train.prove.planting import Plant, Replace, planting

__all__ = ["DEFECTS", "Defect", "Replace", "defect", "planted", "replace_operation"]


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


@dataclass(frozen=True)
class _WrongOperation:
    """An operation of megatron-kernels that is wrong with every backend."""

    name: str
    wrong: Callable[..., Any]

    def __call__(self, *arguments: Any, backend: str = "auto", **options: Any) -> Any:
        del backend
        return self.wrong(*arguments, **options)


def replace_operation(
    replace: Replace, module: ModuleType, name: str, wrong: Callable[..., Any]
) -> None:
    """Replaces an operation that a module imports, and from which layers bind a backend."""
    replace(module, name, _WrongOperation(getattr(module, name).name, wrong))
