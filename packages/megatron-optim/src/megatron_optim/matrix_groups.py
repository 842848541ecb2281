"""Groups of parameters of a rule that needs matrices or sums: the rule is bound to them."""

from collections.abc import Iterable, Mapping

from megatron_parallel import Mesh, Sharding
from megatron_parallel.data_parallel import Trainable, main_dtype
from megatron_parallel.sharding import Cut
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.matrices import Matrices
from megatron_optim.sums import Sums
from megatron_optim.update_rule import UpdateRule


def bind_matrices(
    rule: UpdateRule,
    names: Iterable[str],
    tensors: Mapping[str, Tensor],
    trainable: Trainable,
    cuts: Mapping[str, Cut],
) -> tuple[UpdateRule, dict[str, tuple[int, ...]]]:
    """Returns the rule of a group, and the shape in which it gets each parameter.

    Args:
        rule: A rule that needs matrices.
        names: The parameters of the group.
        tensors: The tensors that this rank updates.
        trainable: The parameters of this rank and their sharding.
        cuts: How parameters are cut into boxes over data-parallel ranks.

    Returns:
        The rule with ``matrices``, and shapes by name. There are none if the rule gathers matrices
        and gets shards in their own shape.

    Raises:
        OptimError: This rank has only a shard of a matrix that the rule needs whole.
    """
    names = list(names)
    dtypes = {trainable.parameters[name].dtype for name in names}
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    matrices = Matrices(
        names,
        trainable.table,
        trainable.mesh,
        cuts,
        dtype=main_dtype(narrowest),
        model_dtype=narrowest,
    )
    shapes = {}
    for name in names:
        if not (rule.gathers and name in cuts):
            tensor, sharding = tensors[name], trainable.table[name]
            shapes[name] = _matrix_shape(name, tensor, sharding, trainable.mesh)
    return rule.bind(matrices), {} if rule.gathers else shapes


def bind_sums(rule: UpdateRule, names: Iterable[str], trainable: Trainable) -> UpdateRule:
    """Returns the rule of a group of parameters that needs sums."""
    names = list(names)
    dtype = main_dtype(trainable.parameters[names[0]].dtype)
    regions = {name: r for shards in trainable.shards for name, r in shards.regions().items()}
    return rule.bind_sums(Sums(names, trainable.table, trainable.mesh, regions, dtype))


def require_matrices(trainable: Trainable, rule: UpdateRule) -> None:
    """Refuses a rule that needs matrices if there is none; a stage of several may have none.

    Raises:
        OptimError: No parameter that requires a gradient is a matrix.
    """
    table = {n: trainable.table[n] for n, p in trainable.parameters.items() if p.requires_grad}
    if rule.needs != "matrices" or trainable.mesh.layout.pp > 1 or not table:
        return
    if not any(rule.handles(sharding) for sharding in table.values()):
        name, sharding = next(iter(table.items()))
        raise OptimError(
            f"the update rule {rule.config.optimizer!r} updates matrices other than token "
            f"embedding and output layer, but none of the {len(table)} parameters is one: {name!r} "
            f"has shape {sharding.shape}; use {rule.fallback}"
        )


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
