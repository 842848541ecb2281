"""Mixers and parameters as plain data.

A mixer's description is the only source of its parameters, multiply-adds and saved activations.
Parameter counts, FLOPs, memory estimates and the activation report are sums over descriptions.
Importing this module does not import torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, Literal, NamedTuple, Protocol

from megatron_parallel import ParallelLayout, RecomputeConfig, Sharding

from megatron_models.components.attention.span import EVERYTHING, Span
from megatron_models.components.measure import Measure
from megatron_models.components.rotary.spec import RotarySpec
from megatron_models.components.saved_bytes import SavedBytes

ClippedRows = dict[str, tuple[tuple[int, float], ...]]
"""Numbers of consecutive rows and their exponents, by name of the parameter."""

BytesByPart = dict[str, int]
"""Saved bytes by the name of the submodule that saves them."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter that is not built: its sharding, and the work that a token does with it.

    Attributes:
        sharding: Global shape and how it is cut.
        multiply_adds: Multiply-adds of one token with the parameter, on all ranks together. 0 for
            a parameter that is added or looked up.
        active_fraction: Fraction of the parameter that one token uses, as ``(numerator,
            denominator)``: for experts, the top-k over the number of experts.
        role: Role of a linear layer's weight, which selects its product. Empty otherwise.
        looked_up: Whether tokens look up a row of the parameter, as in an embedding.
        per_sequence: Whether the multiply-adds are those of one sequence instead of one token, as
            in a pooler.
    """

    sharding: Sharding
    multiply_adds: int = 0
    active_fraction: tuple[int, int] = (1, 1)
    role: str = ""
    looked_up: bool = False
    per_sequence: bool = False

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix whose inputs and outputs both grow with the width of a model."""
        return self.sharding.hidden_matrix and not self.looked_up

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return prod(self.sharding.shape)

    @property
    def active_numel(self) -> int:
        """Number of elements that one token uses."""
        part, whole = self.active_fraction
        return self.numel * part // whole


Parameters = dict[str, ParameterSpec]
"""Parameters by name, in the order of the module."""


class ParallelLinearSpec(Protocol):
    """A parallel layer as plain data, such as `megatron_parallel.tensor_parallel.ColumnSpec`."""

    @property
    def role(self) -> str:
        """The role that selects the layer's product."""

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the sharding of each parameter."""


def parameters_of(spec: ParallelLinearSpec, sequence_parallel: bool) -> Parameters:
    """Returns a linear layer's parameters. A token does one multiply-add per weight element."""
    found = {}
    for name, sharding in spec.shardings(sequence_parallel).items():
        if name == "weight":
            found[name] = ParameterSpec(sharding, prod(sharding.shape), role=spec.role)
        else:
            found[name] = ParameterSpec(sharding)
    return found


def prefixed(prefix: str, parameters: Mapping[str, ParameterSpec]) -> Parameters:
    """Returns the parameters with ``prefix`` and a dot before each name."""
    return {f"{prefix}.{name}": spec for name, spec in parameters.items()}


def routed_parameters(
    parameters: Mapping[str, ParameterSpec], num_experts: int, top_k: int
) -> Parameters:
    """Returns the parameters of experts of which a token uses ``top_k`` of ``num_experts``."""
    return {
        name: replace(
            spec,
            multiply_adds=spec.multiply_adds // num_experts * top_k,
            active_fraction=(top_k, num_experts),
        )
        for name, spec in parameters.items()
    }


@dataclass(frozen=True)
class ExpertParallelism:
    """How the experts of a layer are cut, and how tokens are sent to them.

    Attributes:
        ep: Number of ranks that the experts are divided over.
        expert_tp: Number of ranks that each expert is cut over. None means the tensor-parallel
            size.
        dispatcher: ``allgather`` or ``alltoall``.
    """

    ep: int = 1
    expert_tp: int | None = None
    dispatcher: str = "allgather"


@dataclass(frozen=True)
class LayerPass:
    """One micro-batch in a layer, on one rank.

    Attributes:
        sequence_length: Length of the whole sequence ``s``, in tokens.
        micro_batch_size: Sequences of the micro-batch ``b``.
        saved_bytes: Bytes that operations save.
        tp: Tensor-parallel size ``t``.
        sequence_parallel: Whether the activations between tensor-parallel layers are cut along the
            sequence.
        recompute: What activation checkpointing recomputes.
        experts: How experts are cut.
    """

    sequence_length: int
    micro_batch_size: int
    saved_bytes: SavedBytes
    tp: int = 1
    sequence_parallel: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    experts: ExpertParallelism = field(default_factory=ExpertParallelism)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, ``s b``."""
        return self.sequence_length * self.micro_batch_size

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


Feature = Literal[
    "compile",
    "compiled_split",
    "split_backward",
    "fully_shard",
    "document_pool",
    "from_scratch",
    "decode",
    "equal_layouts",
]
"""What a component may not support: compilation, split backward passes with and without it, fully
sharded parameters, a pool of ranks that share documents, training from random weights, decoding
with a cache, or the same result on any number of data- and context-parallel ranks."""


class UnsupportedFeature(NamedTuple):
    """Why a component does not support a feature.

    Attributes:
        setting: The configuration field that causes it, in braces.
        reason: One clause with the reason and the remedy.
    """

    setting: str
    reason: str


@dataclass(frozen=True)
class KVSpec:
    """Keys and values that a mixer caches for each token when decoding, on one rank.

    Attributes:
        groups: Heads of keys and values.
        key_channels: Channels of a key.
        value_channels: Channels of a value.
        values_in_keys: Whether the values are the first channels of the keys, so that only the keys
            are stored (`LatentKVCache`).
    """

    groups: int
    key_channels: int
    value_channels: int
    values_in_keys: bool = False


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrent state, for one sequence on one rank.

    Attributes:
        shape: Shape of the state of one sequence.
        precise: Whether it has at least float32. Otherwise it has the dtype of the model.
    """

    shape: tuple[int, ...]
    precise: bool = False


@dataclass(frozen=True)
class StateSpec:
    """The recurrent state that a mixer keeps of each sequence when decoding, on one rank.

    Its size does not depend on the number of tokens.

    Attributes:
        tensors: Name and description of each tensor.
    """

    tensors: tuple[tuple[str, StateTensor], ...]


CacheSpec = KVSpec | StateSpec
"""What a mixer caches when decoding."""


class Mixer(ABC):
    """A sublayer between a norm and the residual stream, as plain data.

    A subclass is a frozen dataclass that derives from the configuration whose fields it reads. It
    alone defines the sublayer's parameters. The class named by `module` is built from it.
    """

    module: ClassVar[str]
    """``package.module:Class`` of the `torch.nn.Module`, called with the mixer, the layer number
    and a `megatron_models.Placement`. It is imported when a model is built."""

    recompute_name: ClassVar[str | None] = None
    """Its name in `RecomputeConfig.modules`; None if the mixer cannot be recomputed as a whole."""

    reads_padding: ClassVar[bool] = False
    """Whether its module needs to know which tokens are padding."""

    recurrent: ClassVar[bool] = False
    """Whether it passes a state from token to token, and so needs the document of each token."""

    @property
    def bidirectional(self) -> bool:
        """Whether tokens attend to later tokens too, so that all query-key pairs count."""
        return False

    @property
    def uses_noise(self) -> bool:
        """Whether training needs a `Dropout`, for the key of its noise. Defaults to no."""
        return False

    reads_source: ClassVar[bool] = False
    """Whether its keys and values come from the output of an encoder, as in cross-attention."""

    expert_parallel: ClassVar[bool] = False
    """Whether the axes ``ep`` and ``expert_tp`` cut its parameters."""

    @abstractmethod
    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters, in the order of the module."""

    def state(self) -> Mapping[str, Sharding]:
        """Returns the sharding of state that is not a parameter (`StepState`). Defaults to none."""
        return {}

    @property
    def heads(self) -> int:
        """Number of attention heads. Defaults to 0."""
        return 0

    def cached(self, tp: int) -> CacheSpec | None:
        """Returns what one of ``tp`` tensor-parallel ranks caches in decoding. Defaults to None."""
        return None

    def rotations(self) -> tuple[RotarySpec, ...]:
        """Returns the rotations whose angles the module reads. Defaults to none."""
        return ()

    def spans(self) -> tuple[Span, ...]:
        """Returns the limits of attention whose masks the module reads. Defaults to none."""
        return ()

    def multiply_adds_of_pairs(self, tokens: int, squared_lengths: int) -> int:
        """Returns the multiply-adds of all query-key pairs of some documents.

        Args:
            tokens: Number of tokens.
            squared_lengths: Sum of the squared lengths of the documents.
        """
        each, spans = self.multiply_adds_per_pair(), self.spans() or (EVERYTHING,)
        both_directions = each * max(span.pairs(tokens, squared_lengths) for span in spans)
        return both_directions if self.bidirectional else both_directions // 2

    def multiply_adds_per_pair(self) -> int:
        """Returns the multiply-adds of one query-key pair. Defaults to 0."""
        return 0

    def multiply_adds_of_state(self) -> int:
        """Returns the multiply-adds of one token with a recurrent state. Defaults to 0."""
        return 0

    @abstractmethod
    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the bytes that each submodule saves for the backward pass.

        The mixer's input is left out. The empty name stands for the mixer itself.
        """

    @abstractmethod
    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the name of the submodule that saves the mixer's input, or None."""

    def converts_input(self, layer_pass: LayerPass) -> bool:
        """Returns whether that is a linear layer, which may save its input converted.

        Defaults to True.
        """
        return True

    @property
    def gathers_input(self) -> bool:
        """Whether that layer gathers an input that is cut along the sequence.

        Defaults to True. A layer that every tensor-parallel rank holds reads its own tokens alone.
        """
        return True

    def check_layout(self, layout: ParallelLayout) -> None:  # noqa: B027 - most need no check
        """Refuses a layout that cannot cut the mixer. Accepts every layout by default.

        Raises:
            ConfigError: A layout does not fit; the message names the fields and the sizes.
        """

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns why the mixer does not support a training feature. Defaults to None."""
        return None

    def auxiliary_losses(self) -> tuple[str, ...]:
        """Returns the names of the mixer's auxiliary losses. Defaults to none."""
        return ()

    def counters(self) -> int:
        """Returns the number of values that the mixer counts for reports. Defaults to 0."""
        return 0

    def always_counts(self) -> bool:
        """Returns whether it counts without a report too, to name a cause of NaN.

        Defaults to False. See `megatron_models.components.measure.Measure.remedy`.
        """
        return False

    def clipped_rows(self, alpha: float) -> ClippedRows:
        """Returns how the rows of weights are scaled to bound the scores of each head.

        The keys are names of parameters, whose first dim is that of heads or groups of heads. The
        values are for consecutive rows of the second dim their number and the exponent of the
        factor of the head. Defaults to none: the scores of the mixer cannot be bounded.

        Args:
            alpha: The share of the queries in the factor; the rest is that of the keys.

        Raises:
            ConfigError: Scaled rows do not scale the scores.
        """
        del alpha
        return {}

    def measures(self, counts: Sequence[float]) -> tuple[Measure, ...]:
        """Returns what a report shows of the values that the mixer counted. Defaults to nothing.

        Args:
            counts: Sums over the global batches of one or several steps.
        """
        return ()


def sum_by_part(terms: Iterable[BytesByPart]) -> BytesByPart:
    """Returns the sum of several mappings, name by name."""
    found: BytesByPart = {}
    for each in terms:
        for name, size in each.items():
            found[name] = found.get(name, 0) + size
    return found
