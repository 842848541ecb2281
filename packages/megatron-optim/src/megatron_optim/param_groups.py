"""Groups of parameters with the same update rule, weight decay and learning rate."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from megatron_parallel import Mesh, Sharding, all_reduce
from megatron_parallel.data_parallel import Trainable
from torch import Tensor

from megatron_optim.config import OptimizerConfig
from megatron_optim.errors import OptimError
from megatron_optim.matrix_groups import bind_matrices, bind_sums, require_matrices
from megatron_optim.name_rules import NameRules
from megatron_optim.update_rule import UpdateRule
from megatron_optim.width import SAME_WIDTH, WidthRatio


class ParameterGroup(NamedTuple):
    """Parameters that are updated by one call of a rule.

    Attributes:
        rule: The update rule.
        decay_factor: Factor of the weight decay; 0 for parameters without weight decay.
        decoupled: Whether they are token embeddings or output matrices, which may have their own
            learning rate.
        names: The global names of those that this rank updates. There may be none if the rule
            gathers matrices.
        matrices: For a rule that needs matrices, the shape in which the rule gets each parameter.
            Empty if the rule gathers matrices, and gets them in their own shape.
        lr_factor: Factor of the learning rate, for the width of the parameters.
        lr_mult: Factor of the learning rate, for their names. Unlike the factor for the width, it
            applies to the rate of token embeddings and output matrices, too.
    """

    rule: UpdateRule
    decay_factor: float
    decoupled: bool
    names: tuple[str, ...]
    matrices: Mapping[str, tuple[int, ...]]
    lr_factor: float = 1.0
    lr_mult: float = 1.0

    def rates(
        self, lr: float, decoupled_lr: float | None, weight_decay: float
    ) -> tuple[float, float]:
        """Returns learning rate and weight decay; a decoupled rate does not depend on the width."""
        decay = self.decay_factor * weight_decay
        if self.decoupled and decoupled_lr is not None:
            return self.lr_mult * decoupled_lr, decay
        return self.lr_mult * self.lr_factor * lr, decay


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
    trainable: Trainable,
    rule: UpdateRule,
    fallback: UpdateRule,
    name_rules: NameRules,
    widths: Mapping[str, WidthRatio],
) -> tuple[ParameterGroup, ...]:
    """Returns the groups of parameters, those with weight decay first.

    Args:
        tensors: The tensors that this rank updates, by global name.
        trainable: The parameters of this rank and their sharding.
        rule: The rule of all parameters, or, if it needs matrices, of the matrices between the
            token embedding and the output layer.
        fallback: The rule of the other parameters.
        name_rules: Factors of learning rate and weight decay by name.
        widths: The widths of parameters over those in the model of the learning rate. Parameters
            without an entry have the same width.

    Raises:
        OptimError: A parameter is missing from the table, this rank has only a shard of a matrix
            that the rule needs whole, no parameter is a matrix, or a rule has no learning rates for
            other widths.
    """
    table = trainable.table
    require_shardings(tensors, table)
    require_matrices(trainable, rule)
    cuts = {name: cut for shards in trainable.shards for name, cut in shards.cuts().items()}
    # All ranks of a matrix take part in its update, also those with an empty shard of it.
    empty = [n for n in cuts.keys() - tensors.keys() if rule.gathers and rule.handles(table[n])]
    if rule.needs == "sums":
        everything = (n for n, p in trainable.parameters.items() if p.requires_grad)
        empty = [name for name in everything if name not in tensors]
    found: dict[tuple[float, bool, bool, WidthRatio, float, bool], list[str]] = {}
    for name in (*tensors, *empty):
        sharding, width = table[name], widths.get(name, SAME_WIDTH)
        decay = name_rules.decay_factor(name, decays=sharding.weight_decay)
        own, lr_mult = rule.handles(sharding), name_rules.lr_factor(name)
        matrix = rule.needs == "sums" and sharding.matrix is not None
        key = decay, own, sharding.vocabulary, width, lr_mult, matrix
        found.setdefault(key, []).append(name)
    groups = []
    for (decay, own, decoupled, width, lr_mult, _), names in sorted(found.items(), reverse=True):
        updating, factor = rule if own else fallback, 1.0
        if width != SAME_WIDTH:
            updating, factor = updating.for_width(width)
        shapes: Mapping[str, tuple[int, ...]] = {}
        if updating.needs == "matrices":
            updating, shapes = bind_matrices(updating, names, tensors, trainable, cuts)
            names = sorted(tensors.keys() & set(names))
        elif updating.needs == "sums":
            updating = bind_sums(updating, names, trainable)
            names = sorted(tensors.keys() & set(names))
        groups.append(
            ParameterGroup(updating, decay, decoupled, tuple(names), shapes, factor, lr_mult)
        )
    return tuple(groups)


def require_matches(config: OptimizerConfig, names: Iterable[str], mesh: Mesh) -> None:
    """Refuses patterns of names that match no parameter of any rank. All ranks call it together.

    Raises:
        OptimError: A pattern matches no parameter; the message names it.
    """
    rules = config.name_rules
    if not rules.given or mesh.is_imagined:
        return
    known = list(names)
    own = torch.tensor(rules.matches(known), dtype=torch.float64, device=mesh.device)
    matched = all_reduce(own, mesh.axis("world"), op="max", purpose="patterns of names")
    rules.refuse_unmatched(vars(config), matched.tolist(), known)


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
