"""Which parameters take weight decay."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_parallel import Sharding
from torch import Tensor

from megatron_optim.errors import OptimError


def parameter_groups(
    named_parameters: Mapping[str, Tensor], table: Mapping[str, Sharding], weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters into those that take weight decay and those that do not.

    The sharding table decides, because it knows the global shape: matrices and embeddings decay,
    while biases and parameters whose global shape has one dimension (norm gains) do not.

    Returns up to two dicts for a ``torch.optim`` optimizer, each with ``params``, ``weight_decay``
    and ``decays``; a group without parameters is left out.
    """
    decaying, others = decay_groups(named_parameters, table)
    groups = [
        {
            "params": [named_parameters[name] for name in names],
            "weight_decay": weight_decay if decays else 0.0,
            "decays": decays,
        }
        for names, decays in ((decaying, True), (others, False))
    ]
    return [group for group in groups if group["params"]]


def decay_groups(
    names: Iterable[str], table: Mapping[str, Sharding]
) -> tuple[list[str], list[str]]:
    """Return the names that take weight decay, and those that do not, each in the given order."""
    names = list(names)
    require_shardings(names, table)
    return (
        [name for name in names if table[name].weight_decay],
        [name for name in names if not table[name].weight_decay],
    )


def require_shardings(names: Iterable[str], table: Mapping[str, Sharding]) -> None:
    """Raise if a parameter is missing from the sharding table."""
    missing = sorted(set(names) - table.keys())
    if missing:
        raise OptimError(
            f"no sharding for {len(missing)} of the parameters, the first is {missing[0]!r}; "
            "name parameters and table alike (collect_shardings gives the table of a module)"
        )
