"""One call of an operation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_kernels.inputs import InputGenerator
from megatron_kernels.registry import Op


@dataclass(frozen=True)
class Case:
    """One call of an operation.

    Attributes:
        op: The operation.
        label: What is special about the call.
        arguments: Makes its arguments.
        in_place: Whether the operation changes its first argument.
    """

    op: Op[Any, Any]
    label: str
    arguments: Callable[[InputGenerator], tuple[Any, ...]]
    in_place: bool = False
