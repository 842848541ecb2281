"""Which parameters are updated alike: by which rule, with which weight decay and learning rate."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron_parallel import Mesh, Sharding
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.update_rule import UpdateRule


class ParameterGroup(NamedTuple):
    """Parameters that one call of a rule updates.

    Attributes:
        rule: that updates them.
        decays: whether weight decay applies to them.
        decoupled: whether they are token embeddings or output matrices, whose learning rate may be
            another.
        names: their global names.
        matrices: for a rule that needs matrices, the shape in which it is given each of them.
    """

    rule: UpdateRule
    decays: bool
    decoupled: bool
    names: tuple[str, ...]
    matrices: Mapping[str, tuple[int, ...]]


def parameter_groups(
    named_parameters: Mapping[str, Tensor], table: Mapping[str, Sharding], weight_decay: float
) -> list[dict[str, Any]]:
    """Splits parameters into those that take weight decay and those that do not.

    The sharding table decides, because it knows the global shape: matrices and embeddings decay,
    while biases and parameters whose global shape has one dimension (norm gains) do not.

    Returns up to two dicts for a ``torch.optim`` optimizer, each with ``params``, ``weight_decay``
    and ``decays``; a group without parameters is left out.
    """
    require_shardings(named_parameters, table)
    groups = [
        {
            "params": [p for name, p in named_parameters.items() if table[name].weight_decay == on],
            "weight_decay": weight_decay if on else 0.0,
            "decays": on,
        }
        for on in (True, False)
    ]
    return [group for group in groups if group["params"]]


def build_parameter_groups(
    tensors: Mapping[str, Tensor],
    table: Mapping[str, Sharding],
    mesh: Mesh,
    rule: UpdateRule,
    fallback: UpdateRule,
) -> tuple[ParameterGroup, ...]:
    """Returns the groups of parameters, those with weight decay first.

    ``rule`` updates all parameters or, if it needs matrices, those that are matrices between the
    token embedding and the output layer; ``fallback`` updates the rest. ``tensors`` are what this
    rank updates, by global name.

    Raises:
        OptimError: a parameter is missing from the table, or this rank has only a part of a matrix
            that the rule needs whole.
    """
    require_shardings(tensors, table)
    found: dict[tuple[bool, bool, bool], list[str]] = {}
    for name in tensors:
        sharding = table[name]
        key = sharding.weight_decay, rule.handles(sharding), sharding.vocabulary
        found.setdefault(key, []).append(name)
    groups = []
    for (decays, own, decoupled), names in sorted(found.items(), reverse=True):
        matrices = (
            {name: _matrix_shape(name, tensors[name], table[name], mesh) for name in names}
            if own and rule.needs == "matrices"
            else {}
        )
        updating = rule if own else fallback
        groups.append(ParameterGroup(updating, decays, decoupled, tuple(names), matrices))
    return tuple(groups)


def _matrix_shape(name: str, tensor: Tensor, sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of a parameter's tensor as a matrix, or as one for each expert."""
    local = sharding.local_shape(mesh)
    if tuple(tensor.shape) != local:
        raise OptimError(
            f"the update rule needs matrices whole, and this rank updates a part of {name!r} of "
            f"shape {tuple(tensor.shape)}, not {local}: make the gradient buffers with "
            "DataParallelConfig(whole_matrices=True); fully sharded data parallelism "
            "(--use-torch-fsdp2) cannot keep them whole"
        )
    return sharding.local_matrix(mesh)


def require_shardings(names: Iterable[str], table: Mapping[str, Sharding]) -> None:
    """Raises if a parameter is missing from the sharding table."""
    missing = sorted(set(names) - table.keys())
    if missing:
        raise OptimError(
            f"no sharding for {len(missing)} of the parameters, the first is {missing[0]!r}; "
            "name parameters and table alike (collect_shardings gives the table of a module)"
        )
