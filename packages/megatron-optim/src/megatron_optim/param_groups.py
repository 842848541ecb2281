"""Groups of parameters with the same update rule, weight decay and learning rate."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron_parallel import Mesh, Sharding
from megatron_parallel.data_parallel import Trainable
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.update_rule import UpdateRule
from megatron_optim.width import SAME_WIDTH, WidthRatio


class ParameterGroup(NamedTuple):
    """Parameters that are updated by one call of a rule.

    Attributes:
        rule: The update rule.
        decays: Whether weight decay applies to the parameters.
        decoupled: Whether they are token embeddings or output matrices, which may have their own
            learning rate.
        names: Their global names.
        matrices: For a rule that needs matrices, the shape in which the rule gets each parameter.
        lr_factor: Factor of the learning rate, for the width of the parameters.
    """

    rule: UpdateRule
    decays: bool
    decoupled: bool
    names: tuple[str, ...]
    matrices: Mapping[str, tuple[int, ...]]
    lr_factor: float = 1.0

    def rates(
        self, lr: float, decoupled_lr: float | None, weight_decay: float
    ) -> tuple[float, float]:
        """Returns learning rate and weight decay of the group; a decoupled rate is absolute."""
        decay = weight_decay if self.decays else 0.0
        if self.decoupled and decoupled_lr is not None:
            return decoupled_lr, decay
        return self.lr_factor * lr, decay


def parameter_groups(
    named_parameters: Mapping[str, Tensor], table: Mapping[str, Sharding], weight_decay: float
) -> list[dict[str, Any]]:
    """Splits parameters into groups with and without weight decay.

    The sharding table decides, because it has the global shapes. Matrices and embeddings decay;
    biases and parameters with one global dim (norm gains) do not.

    Returns:
        Up to two dicts for a ``torch.optim`` optimizer, each with ``params``, ``weight_decay`` and
        ``decays``. A group without parameters is left out.
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
    widths: Mapping[str, WidthRatio],
) -> tuple[ParameterGroup, ...]:
    """Returns the groups of parameters, those with weight decay first.

    Args:
        tensors: The tensors that this rank updates, by global name.
        table: The sharding of every parameter.
        mesh: The mesh of the model.
        rule: The rule of all parameters, or, if it needs matrices, of the matrices between the
            token embedding and the output layer.
        fallback: The rule of the other parameters.
        widths: The widths of parameters over those in the model of the learning rate. Parameters
            without an entry have the same width.

    Raises:
        OptimError: A parameter is missing from the table, this rank has only a shard of a matrix
            that the rule needs whole, or a rule has no learning rates for other widths.
    """
    require_shardings(tensors, table)
    found: dict[tuple[bool, bool, bool, WidthRatio], list[str]] = {}
    for name in tensors:
        sharding, width = table[name], widths.get(name, SAME_WIDTH)
        key = sharding.weight_decay, rule.handles(sharding), sharding.vocabulary, width
        found.setdefault(key, []).append(name)
    groups = []
    for (decays, own, decoupled, width), names in sorted(found.items(), reverse=True):
        matrices = (
            {name: _matrix_shape(name, tensors[name], table[name], mesh) for name in names}
            if own and rule.needs == "matrices"
            else {}
        )
        updating, factor = rule if own else fallback, 1.0
        if width != SAME_WIDTH:
            updating, factor = updating.for_width(width)
        groups.append(ParameterGroup(updating, decays, decoupled, tuple(names), matrices, factor))
    return tuple(groups)


def _matrix_shape(name: str, tensor: Tensor, sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of a parameter as a matrix, or as one matrix for each expert."""
    local = sharding.local_shape(mesh)
    if tuple(tensor.shape) != local:
        raise OptimError(
            f"the update rule needs whole matrices, but this rank updates a shard of {name!r} of "
            f"shape {tuple(tensor.shape)} instead of {local}; build the gradient buffers with "
            "DataParallelConfig(whole_matrices=True); fully sharded data parallelism "
            "(--use-torch-fsdp2) always shards matrices"
        )
    return sharding.local_matrix(mesh)


def require_shardings(names: Iterable[str], table: Mapping[str, Sharding]) -> None:
    """Raises OptimError if a parameter is missing from the sharding table."""
    missing = sorted(set(names) - table.keys())
    if missing:
        raise OptimError(
            f"the sharding table lacks {len(missing)} parameters, the first is {missing[0]!r}; "
            "use the table of the same module (collect_shardings)"
        )


def require_distinct(trainable: Trainable) -> None:
    """Raises OptimError if a parameter has two names, or none requires a gradient."""
    parameters = {n: p for n, p in trainable.parameters.items() if p.requires_grad}
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = names.setdefault(id(parameter), name)
        if other != name:
            raise OptimError(f"{other!r} and {name!r} are the same parameter; name it once")
    if not parameters and trainable.mesh.layout.pp == 1:  # a whole stage may be frozen
        raise OptimError("there is no parameter to optimize: none requires a gradient")
