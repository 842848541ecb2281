"""The contract of an update rule, and how rules are found.

A rule turns a gradient into a change of its parameter: AdamW, SGD with momentum, or one that
another distribution brings under the entry-point group ``megatron.update_rules``. Everything else
is the optimizer's work: the gradient norm and clipping, skipped steps, fp32 main parameters of bf16
weights, shards of data-parallel ranks, and checkpoint views of the rule's state. Importing this
module does not import torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_parallel import Sharding

from megatron_optim.config import OptimizerConfig
from megatron_optim.errors import OptimError
from megatron_optim.rule_registry import RULES, UpdateRuleKind, find_rule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAIN_SUFFIX = "main"
"""Suffix of fp32 main parameters in checkpoints, which no state tensor may have."""

Needs = Literal["elements", "matrices"]


@dataclass(frozen=True)
class StateTensor:
    """A tensor that a rule keeps for every tensor it updates, of the same shape and zero at first.

    Attributes:
        name: suffix in checkpoints, where the tensor is called ``PARAMETER.NAME``.
        dtype: of the tensor. Defaults to that of the main parameter, float32 or float64.
    """

    name: str
    dtype: "torch.dtype | None" = None


class UpdateRule(ABC):
    """How parameters follow from gradients.

    A subclass names its ``state`` and updates in `update`. An `UpdateRuleKind` names the class; it
    is called with the `OptimizerConfig` of the run. A state that depends on the configuration is
    set in the constructor.

    Attributes:
        config: settings of the run; those of the rule's own are in ``config.settings``.
        needs: ``elements`` if every element is updated by itself: what `update` is given may be any
            flat part of a parameter. ``matrices`` if a matrix is updated as a whole: see `update`.
            Such a rule is given matrices that are neither token embeddings nor output matrices; the
            other parameters are updated by the rule ``fallback``.
        others: for a rule that needs matrices, name of the rule of the other parameters.
        state: the tensors it keeps for each tensor it updates.
    """

    needs: ClassVar[Needs] = "elements"
    fallback: ClassVar[str] = "adam"
    state: Sequence[StateTensor] = ()

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    def handles(self, sharding: Sharding) -> bool:
        """Returns whether a parameter is updated by this rule, and not by ``fallback``.

        A rule that needs matrices may take fewer of them, but no others: only those are kept whole.
        """
        return self.needs == "elements" or sharding.hidden_matrix

    @abstractmethod
    def update(
        self,
        parameters: "Sequence[Tensor]",
        gradients: "Sequence[Tensor]",
        state: "Mapping[str, Sequence[Tensor]]",
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Updates parameters and state in place, without a gradient of its own.

        It is called once a step for each group of parameters with one learning rate and one weight
        decay, and not at all in a step that is skipped.

        Args:
            parameters: main parameters, float32 or float64, all on one device. Of a rule that needs
                matrices each is a matrix ``[rows, columns]``, or one matrix for each expert of a
                layer ``[experts, rows, columns]``; under tensor parallelism it is this rank's part.
            gradients: of these parameters, clipped, in the same dtype and shape. The rule may
                overwrite them.
            state: under each name of ``state`` a tensor for each parameter, in the same shape.
            lr: learning rate of this step.
            weight_decay: of this step; 0 for parameters that take none.
            step: number of the update, from 1; steps that were skipped do not count.
        """


def build_rules(config: OptimizerConfig) -> tuple[UpdateRule, UpdateRule]:
    """Returns the rule that a configuration names, and that of the parameters it does not take.

    They are the same unless the first needs matrices.

    Raises:
        OptimError: a rule is not installed, cannot be imported, or breaks the contract.
    """
    rule = _build(config.optimizer, config)
    if rule.needs == "elements":
        return rule, rule
    fallback = _build(rule.fallback, config)
    if fallback.needs != "elements":
        raise OptimError(
            f"the update rule {config.optimizer!r} leaves other parameters to {rule.fallback!r}, "
            "which needs matrices too: its `fallback` must name a rule that needs elements"
        )
    return rule, fallback


def needs_matrices(config: OptimizerConfig) -> bool:
    """Returns whether the update rule of a configuration needs matrices whole.

    Then gradient buffers that are cut over data-parallel ranks are made with
    ``DataParallelConfig(whole_matrices=True)``.
    """
    return build_rules(config)[0].needs == "matrices"


def _class_of(kind: UpdateRuleKind) -> type[UpdateRule]:
    try:
        found: object = EntryPoint(kind.name, kind.rule, RULES.group).load()
    except (ImportError, AttributeError) as error:
        raise OptimError(
            f"the update rule {kind.name!r} is {kind.rule}, which cannot be imported: {error}; "
            "repair or uninstall the distribution that brings it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, UpdateRule)):
        raise OptimError(
            f"the update rule {kind.name!r} is {kind.rule}, which is no subclass of "
            "megatron_optim.UpdateRule"
        )
    return found


def _build(name: str, config: OptimizerConfig) -> UpdateRule:
    kind = find_rule(name)
    settings = config.settings
    if kind.section is None:
        settings = None
    elif not isinstance(settings, kind.section.config):  # none given, or another rule's
        settings = kind.section.config()
    rule = _class_of(kind)(replace(config, settings=settings))
    names = [tensor.name for tensor in rule.state]
    if len({*names, MAIN_SUFFIX}) <= len(names):
        raise OptimError(
            f"the update rule {name!r} has the state {', '.join(names)}: names must differ from "
            f"one another and from {MAIN_SUFFIX}, the suffix of main parameters"
        )
    return rule
