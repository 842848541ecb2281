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
    require_shardings(named_parameters, table)
    decaying = [p for name, p in named_parameters.items() if table[name].weight_decay]
    others = [p for name, p in named_parameters.items() if not table[name].weight_decay]
    groups = [
        {"params": decaying, "weight_decay": weight_decay, "decays": True},
        {"params": others, "weight_decay": 0.0, "decays": False},
    ]
    return [group for group in groups if group["params"]]


def require_shardings(names: Iterable[str], table: Mapping[str, Sharding]) -> None:
    """Raise if a parameter is missing from the sharding table."""
    missing = sorted(set(names) - table.keys())
    if missing:
        raise OptimError(
            f"no sharding for {len(missing)} of the parameters, the first is {missing[0]!r}; "
            "name parameters and table alike (collect_shardings gives the table of a module)"
        )
