"""What components say of themselves, as plain data: parameters, products, kept activations.

Counting, floating-point operations, memory and the activation report are sums over what components
say here; no file lists them a second time. Importing this module does not import torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, Literal, NamedTuple, Protocol

from megatron_parallel import ParallelLayout, RecomputeConfig, Sharding

from megatron_models.components.saved_bytes import SavedBytes

BytesByPart = dict[str, int]
"""Bytes by the part that keeps them."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter that is not built: how it is cut, and what a token does with it.

    Attributes:
        sharding: shape and cut.
        multiplied: elements that one token is multiplied with, on all ranks together; 0 for what is
            added or looked up.
        chosen: the share of the parameter that one token uses, as a fraction ``(part, whole)``:
            experts that it goes to, of all.
        role: of a linear layer's weight, by which a product is chosen for it; empty for others.
    """

    sharding: Sharding
    multiplied: int = 0
    chosen: tuple[int, int] = (1, 1)
    role: str = ""

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return prod(self.sharding.shape)

    @property
    def active(self) -> int:
        """Elements that one token uses."""
        part, whole = self.chosen
        return self.numel * part // whole


Parameters = dict[str, ParameterSpec]
"""Parameters by name, in the order in which a module has them."""


class HasShardings(Protocol):
    """A parallel layer as plain data, such as `megatron_parallel.tensor_parallel.ColumnSpec`."""

    @property
    def role(self) -> str:
        """What products are chosen by."""

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns how its parameters are cut."""


def parameters_of(spec: HasShardings, sequence_parallel: bool) -> Parameters:
    """Returns the parameters of a linear layer: every element of the weight is multiplied once."""
    found = {}
    for name, sharding in spec.shardings(sequence_parallel).items():
        if name == "weight":
            found[name] = ParameterSpec(sharding, prod(sharding.shape), role=spec.role)
        else:
            found[name] = ParameterSpec(sharding)
    return found


def prefixed(prefix: str, parameters: Mapping[str, ParameterSpec]) -> Parameters:
    """Returns parameters under names that begin with ``prefix`` and a dot."""
    return {f"{prefix}.{name}": spec for name, spec in parameters.items()}


def of_experts(parameters: Mapping[str, ParameterSpec], experts: int, chosen: int) -> Parameters:
    """Returns parameters of which a token uses those of ``chosen`` of ``experts`` experts."""
    return {
        name: replace(
            spec, multiplied=spec.multiplied // experts * chosen, chosen=(chosen, experts)
        )
        for name, spec in parameters.items()
    }


@dataclass(frozen=True)
class ExpertRanks:
    """How the experts of a layer are cut, and how tokens get to them.

    Attributes:
        ep: parts of the experts.
        expert_tp: parts of each expert; None is the tensor-parallel size.
        dispatcher: ``allgather`` or ``alltoall``.
    """

    ep: int = 1
    expert_tp: int | None = None
    dispatcher: str = "allgather"


@dataclass(frozen=True)
class LayerPass:
    """One micro-batch on its way through a layer, on one rank.

    Attributes:
        sequence_length: ``s``, all of it.
        micro_batch_size: ``b``.
        saved_bytes: what operations keep, in bytes.
        tp: ``t``, ranks over which heads and feed-forward layer are cut.
        sequence_parallel: whether what lies between is cut along the sequence over them.
        recompute: of parts of a layer.
        experts: how experts are cut.
    """

    sequence_length: int
    micro_batch_size: int
    saved_bytes: SavedBytes
    tp: int = 1
    sequence_parallel: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    experts: ExpertRanks = field(default_factory=ExpertRanks)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, ``s b``."""
        return self.sequence_length * self.micro_batch_size

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream that this rank has."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


Feature = Literal["compile", "split_backward", "fully_shard", "document_pool", "from_scratch"]
"""A way to train that a component may refuse: compiled code, backward passes in two halves, fully
sharded parameters, a pool of ranks that shares out documents, or training from random weights."""


class Refusal(NamedTuple):
    """Why a component cannot be trained in some way.

    Attributes:
        setting: that is responsible, a field of the configuration in braces.
        why: one clause, and what to do.
    """

    setting: str
    why: str


class Mixer(ABC):
    """A sublayer as plain data: what stands between a norm and the residual stream.

    A subclass is a frozen dataclass that derives from the configuration whose fields it reads. It
    is the one place that knows the sublayer's parameters; the module that `module` names is built
    from it.
    """

    module: ClassVar[str]
    """``package.module:Class`` of the `torch.nn.Module`, called with the mixer, the layer's number
    and a `megatron_models.Placement`. It is imported when a model is built."""

    recomputed_as: ClassVar[str | None] = None
    """Its name in `RecomputeConfig.modules`, if the whole of it can be recomputed."""

    reads_padding: ClassVar[bool] = False
    """Whether it has to know which tokens are padding."""

    both_directions: ClassVar[bool] = False
    """Whether tokens attend to later ones too, so that no half of the pairs is left out."""

    expert_parallel: ClassVar[bool] = False
    """Whether axes ``ep`` and ``expert_tp`` cut it."""

    @abstractmethod
    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns its parameters, in the order of the module."""

    def state(self) -> Mapping[str, Sharding]:
        """Returns its state that is not a parameter (`megatron_parallel.StepState`); none here."""
        return {}

    @property
    def heads(self) -> int:
        """Heads of attention, which ranks may share out; none here."""
        return 0

    def products_per_pair(self) -> int:
        """Returns the multiply-adds of one query and one key that it may attend to; none here."""
        return 0

    @abstractmethod
    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the bytes that it keeps for its backward pass, by part of it, without its input.

        The empty name is the mixer itself.
        """

    @abstractmethod
    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the part that keeps the mixer's input, None if none does."""

    def check_layout(self, layout: ParallelLayout) -> None:  # noqa: B027 - most need no check
        """Refuses a layout that cannot cut it; by default there is none.

        Raises:
            ConfigError: naming fields of the configuration and degrees.
        """

    def refuses(self, feature: Feature) -> Refusal | None:
        """Returns why it cannot be trained with a feature; None if it can, as by default."""
        return None

    def auxiliary_losses(self) -> tuple[str, ...]:
        """Returns the names of the losses that it has of its own; none by default."""
        return ()


def sum_by_part(terms: Iterable[BytesByPart]) -> BytesByPart:
    """Returns the sum of terms by name."""
    found: BytesByPart = {}
    for each in terms:
        for name, size in each.items():
            found[name] = found.get(name, 0) + size
    return found
