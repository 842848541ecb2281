"""The contract of an update rule, and the construction of rules.

A rule computes the update of a parameter from its gradient: AdamW, SGD with momentum, or a rule
that another distribution registers in the entry-point group ``megatron.update_rules``. The
optimizer does everything else: the gradient norm and clipping, skipped steps, fp32 main parameters
of bf16 weights, shards of data-parallel ranks, and checkpoint views of the state of the rule.
Importing this module does not import torch.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from megatron_parallel import Sharding

from megatron_optim.config import OptimizerConfig
from megatron_optim.errors import OptimError
from megatron_optim.rule_registry import RULES, UpdateRuleKind, find_rule
from megatron_optim.state_format_config import (
    PRECISION_BITS,
    STATE_FORMATS,
    StateFormatConfig,
    bytes_of,
)
from megatron_optim.width import WidthRatio

if TYPE_CHECKING:
    import torch
    from megatron_parallel import View
    from torch import Tensor

    from megatron_optim.matrices import Matrices
    from megatron_optim.sums import Sums

MAIN_SUFFIX = "main"
"""The suffix of fp32 main parameters in checkpoints. State tensors must not have this name."""

Needs = Literal["elements", "matrices", "sums"]


@dataclass(frozen=True)
class StateTensor:
    """A tensor that a rule stores for a parameter, with the parameter's shape and initially 0.

    Attributes:
        name: The suffix in checkpoints, where the tensor is named ``PARAMETER.NAME``.
        dtype: The dtype of the tensor. Defaults to that of the main parameter, float32 or float64.
        decay: The factor by which a running mean keeps its value in a step. Formats that would
            round the change away are refused. None if any format can hold the state.
        positive: Whether the rule divides by the value, so that formats must not round positive
            values to 0.
    """

    name: str
    dtype: "torch.dtype | None" = None
    decay: float | None = None
    positive: bool = False


@dataclass(frozen=True)
class UnreadStep:
    """Numbers of a step that are on the device and that the host has not read.

    The numbers are float32 scalars, in the form that the fused optimizers of torch accept.

    Attributes:
        number: The number of the update, from 1. Skipped steps do not count.
        skip: 1 if the step must not change any value; otherwise 0.
            The gradients of such a step may contain NaN.
        divisor: The number that the rule divides the gradients by, to clip them. None if it must
            not divide them.
        rounded: For a rule that ``rounds``, the tensor that it rounds each parameter into, or None
            if it must not round it. Empty if it must round none. They are bf16 or fp16, contiguous,
            and on the same device.
    """

    number: "Tensor"
    skip: "Tensor"
    divisor: "Tensor | None"
    rounded: "Sequence[Tensor | None]" = ()


class UpdateRule(ABC):
    """The base class of update rules.

    A subclass defines ``state`` and `update`. An `UpdateRuleKind` names the class, which is
    constructed with the `OptimizerConfig` of the run. State that depends on the configuration is
    defined in the constructor.

    Attributes:
        config: The settings of the run. Settings that only this rule has are in
            ``config.settings``.
        needs: ``elements`` if every element is updated by itself; `update` may then get any flat
            range of a parameter. ``matrices`` if a matrix is updated as a whole; see `update`. Such
            a rule gets the matrices that are neither token embeddings nor output matrices; the rule
            ``fallback`` updates the other parameters. ``sums`` if an element depends on sums over
            rows, columns or whole parameters; see `bind_sums`. All parameters of a group are then
            updated in one call, also if this rank has no part of one.
        gathers: For a rule that needs matrices, whether it computes functions of whole matrices
            with ``matrices``. `update` then gets this rank's shards in any shape. Otherwise it gets
            matrices, and those of fully sharded parameters are refused. Defaults to False.
        matrices: For a rule that needs matrices, the matrices of the parameters that `update` gets;
            set by `bind`.
        fallback: For a rule that needs matrices, the name of the rule of the other parameters.
            Defaults to ``adam``.
        decides_on: The types of devices on which `update_unread` can be called. On other devices
            the host waits in each step until it knows whether the gradients are finite, and then
            calls `update`. Defaults to none. If the CPU trains, `update` is called, except for
            ``divides``. With ``cpu``, `update_unread` also updates state that is offloaded to the
            host.
        divides: Whether `update_unread` divides the gradients in the pass over memory that updates
            the parameters. A CPU then calls it in steps that clip, instead of scaling the gradients
            before. Divisors are float32, so float64 gradients are scaled before. Defaults to False.
        rounds: Whether `update_unread` rounds parameters into ``UnreadStep.rounded`` in the pass
            over memory that updates them, to the nearest number and ties to even, as ``copy_`` of
            torch does. In a step that is skipped it must leave them as they are. `prepare` may set
            it. The optimizer rounds all others. Defaults to False.
        state: The state tensors of each parameter.
        summed_state: The names of state that `views` returns.
    """

    needs: ClassVar[Needs] = "elements"
    gathers: ClassVar[bool] = False
    matrices: "Matrices | None" = None
    fallback: str = "adam"
    decides_on: ClassVar[tuple[str, ...]] = ()
    divides: ClassVar[bool] = False
    rounds: bool = False
    state: Sequence[StateTensor] = ()
    summed_state: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    def handles(self, sharding: Sharding) -> bool:
        """Returns whether this rule updates a parameter; ``fallback`` updates the others.

        A rule that needs matrices may override this method to handle fewer of them. It cannot
        handle other parameters, because only these matrices are not sharded over data-parallel
        ranks.
        """
        return self.needs != "matrices" or sharding.hidden_matrix

    def state_sizes(self, sharding: Sharding) -> dict[str, float]:
        """Returns the elements of each state tensor for each element of a parameter."""
        del sharding
        return {tensor.name: 1.0 for tensor in self.state}

    def bind(self, matrices: "Matrices") -> Self:
        """Returns the rule for a group of parameters, with the attribute ``matrices``.

        The method is called for each group of a rule that needs matrices, when the optimizer is
        constructed. A rule may override it to refuse a layout.
        """
        bound = copy.copy(self)
        bound.matrices = matrices
        return bound

    def bind_sums(self, sums: "Sums") -> Self:
        """Returns the rule for a group of parameters, with state whose shape differs from theirs.

        The method is called for each group of a rule that needs sums, when the optimizer is
        constructed. The parameters of a group are either all matrices, or none of them is.

        Raises:
            OptimError: The rule needs sums, and does not override this method.
        """
        raise OptimError(
            f"the update rule {type(self).__name__} needs sums, but does not define bind_sums; "
            'define it, or set needs to "elements"'
        )

    def prepare(self, tensors: "Mapping[str, Tensor]") -> None:
        """Prepares to update a group of parameters, when the optimizer is constructed.

        A rule may override it to refuse dtypes or devices. Defaults to nothing.

        Args:
            tensors: The main parameters of the group by name, which may be in host memory.
        """
        del tensors

    def views(self) -> "dict[str, list[View]]":
        """Returns views of state whose shape differs from the parameters', for a checkpoint.

        Names are those of parameters with a suffix of ``summed_state``. Defaults to none.
        """
        return {}

    def for_width(self, width: WidthRatio) -> tuple[Self, float]:
        """Returns the rule for parameters of another width, and the factor of their learning rate.

        With them, the learning rate that is best for one width is best for all (maximal update
        parametrization, Yang et al. 2022, "Tensor Programs V", table 8). The rule returned differs
        in settings such as the epsilon of Adam, and has the same ``state``. The method is called
        when the optimizer is constructed, unless the width is the same.

        Args:
            width: Sizes of the parameters over those in the model of the learning rate.

        Raises:
            OptimError: The rule does not override this method.
        """
        raise OptimError(
            f"the update rule {type(self).__name__} has no learning rates for other widths of a "
            "model, as maximal update parametrization (--use-mup) needs; use adam or sgd, or leave "
            "it out"
        )

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
        """Updates parameters and state in place, with gradients disabled.

        This method is called once a step for each group of parameters with the same learning rate
        and weight decay. It is not called in a step that is skipped.

        Args:
            parameters: Main parameters, float32 or float64, all on one device. For a rule that
                needs matrices, each is a matrix ``[rows, columns]`` or one matrix for each expert
                of a layer ``[experts, rows, columns]``; under tensor parallelism it is the shard of
                this rank. For a rule that ``gathers``, each is this rank's shard of
                ``matrices.names`` in this order, without empty shards; there may be none.
            gradients: The clipped gradients of these parameters, in the same dtype and shape. The
                rule may overwrite them.
            state: For each name in ``state``, a tensor for each parameter, in the same shape.
            lr: The learning rate of this step.
            weight_decay: The weight decay of this step; 0 for parameters without weight decay.
            step: The number of the update, from 1. Skipped steps do not count.
        """

    def update_unread(
        self,
        parameters: "Sequence[Tensor]",
        gradients: "Sequence[Tensor]",
        state: "Mapping[str, Sequence[Tensor]]",
        *,
        lr: float,
        weight_decay: float,
        step: UnreadStep,
    ) -> None:
        """Updates parameters and state like `update`, unless the device decides to skip the step.

        A rule that overrides this method names the types of devices in ``decides_on``. The method
        must not wait for the device. It is called in every step.

        Args:
            parameters: As for `update`.
            gradients: The gradients of these parameters, before they are divided by
                ``step.divisor``.
            state: As for `update`.
            lr: The learning rate of this step.
            weight_decay: The weight decay of this step.
            step: The numbers of the step on the device.
        """
        raise NotImplementedError(f"{type(self).__name__} lists devices, but has no update_unread")


def build_rules(config: OptimizerConfig) -> tuple[UpdateRule, UpdateRule]:
    """Returns the rule of a configuration and the rule of the parameters that it does not handle.

    Both are the same unless the first needs matrices.

    Raises:
        OptimError: A rule is not installed, cannot be imported, or violates the contract.
    """
    rule = _build(config.optimizer, config)
    if rule.needs != "matrices":
        return rule, rule
    fallback = _build(rule.fallback, config)
    if fallback.needs != "elements":
        raise OptimError(
            f"the update rule {config.optimizer!r} has the fallback {rule.fallback!r}, which needs "
            "matrices as well; `fallback` must name a rule that needs elements"
        )
    return rule, fallback


def needs_matrices(config: OptimizerConfig) -> bool:
    """Returns whether the update rule of a configuration needs whole matrices.

    If so, gradient buffers that are sharded over data-parallel ranks need
    ``DataParallelConfig(whole_matrices=True)``.
    """
    return build_rules(config)[0].needs == "matrices"


def state_bytes(config: OptimizerConfig, formats: StateFormatConfig) -> Callable[[Sharding], float]:
    """Returns a function of a parameter's sharding: bytes of state for each of its elements.

    Main parameters are not counted.
    """
    rule, fallback = build_rules(config)

    def of_parameter(sharding: Sharding) -> float:
        sizes = (rule if rule.handles(sharding) else fallback).state_sizes(sharding)
        return sum(size * bytes_of(formats.format_of(name)) for name, size in sizes.items())

    return of_parameter


def check_state_formats(config: OptimizerConfig, formats: StateFormatConfig) -> None:
    """Refuses formats of state that the update rule does not have, or that cannot hold it.

    A running mean of decay rate `r` changes by a share of up to ``1 - r`` in a step. Rounding must
    not undo the change: half a unit in the last place of `p` bits is a share of up to ``2**-p``.

    Raises:
        OptimError: A format does not fit.
    """
    states = {state.name: state for rule in build_rules(config) for state in rule.state}
    for name in ("exp_avg", "exp_avg_sq"):
        wanted = formats.format_of(name)
        if wanted == "fp32":
            continue
        if name not in states:
            raise OptimError(
                f"{{{name}_dtype}} has no effect: the update rule {config.optimizer} has no state "
                f"{name}; leave it out",
                vars(formats),
            )
        decay, lost = states[name].decay, 2.0 ** -PRECISION_BITS[wanted]
        if decay is not None and 1.0 - decay <= lost:
            fits = [f for f in STATE_FORMATS if 1.0 - decay > 2.0 ** -PRECISION_BITS[f]]
            raise OptimError(
                f"{{{name}_dtype}} cannot hold a running mean of decay rate {decay}, which changes "
                f"by {1.0 - decay:.4g} in a step: {wanted} rounds changes up to {lost:.4g} away; "
                f"use {' or '.join(fits)}, or a decay rate below {1.0 - lost:.4g}",
                vars(formats),
            )


def check_width_rules(config: OptimizerConfig) -> None:
    """Refuses an update rule that has no learning rates for other widths of a model.

    Raises:
        OptimError: The rule or its fallback does not override `UpdateRule.for_width`.
    """
    for rule in build_rules(config):
        rule.for_width(WidthRatio(2.0, 2.0))


def _class_of(kind: UpdateRuleKind) -> type[UpdateRule]:
    try:
        rule_class: object = EntryPoint(kind.name, kind.rule, RULES.group).load()
    except (ImportError, AttributeError) as error:
        raise OptimError(
            f"the update rule {kind.name!r} is {kind.rule}, which cannot be imported: {error}; "
            "repair or uninstall its distribution"
        ) from error
    if not (isinstance(rule_class, type) and issubclass(rule_class, UpdateRule)):
        raise OptimError(
            f"the update rule {kind.name!r} is {kind.rule}, which is not a subclass of "
            "megatron_optim.UpdateRule"
        )
    return rule_class


def _build(name: str, config: OptimizerConfig) -> UpdateRule:
    kind = find_rule(name)
    settings = config.settings
    if kind.section is None:
        settings = None
    elif not isinstance(settings, kind.section.config):  # unset, or of another rule
        settings = kind.section.config()
    rule = _class_of(kind)(replace(config, settings=settings))
    names = [tensor.name for tensor in rule.state]
    if len({*names, MAIN_SUFFIX}) <= len(names):
        raise OptimError(
            f"the update rule {name!r} has the state {', '.join(names)}; names must be unique and "
            f"differ from {MAIN_SUFFIX}, the suffix of main parameters"
        )
    return rule
