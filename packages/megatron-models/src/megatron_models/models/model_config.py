"""The base of model configurations of all kinds. Importing this module does not import torch.

A kind's configuration derives from `ModelConfig` and from the configurations of its components. Its
method `trunks` composes them. Parameters, multiply-adds and activations are sums over components.
"""

import dataclasses
import difflib
import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

from megatron_parallel import ParallelLayout, Sharding

from megatron_models.components.embedding.spec import (
    EmbeddingConfig,
    EmbeddingSpec,
    output_parameters,
)
from megatron_models.components.fields import ComponentConfig
from megatron_models.components.head import Head
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.mixer import (
    CacheSpec,
    Feature,
    Mixer,
    Parameters,
    UnsupportedFeature,
    prefixed,
)
from megatron_models.components.multi_token.spec import MultiTokenSpec, multi_token_loss
from megatron_models.components.relative_bias.spec import RelativeBiasConfig
from megatron_models.errors import ConfigError

_SHOWN = 5
"""Number of wrong keys that an error names."""


class MultiplyAdds(NamedTuple):
    """Multiply-adds of a forward pass.

    Attributes:
        per_token: Multiply-adds of one token with the weights, and with recurrent states.
        per_pair: Multiply-adds of one query-key pair, in all layers together.
        per_sequence: Multiply-adds of one sequence, such as those of a pooler.
    """

    per_token: int
    per_pair: int
    per_sequence: int


@dataclasses.dataclass(frozen=True)
class ModelConfig(ComponentConfig, ABC):
    """Base of model configurations: plain values, converted to and from JSON.

    Raises:
        ConfigError: A value has the wrong type or range, or values do not fit together. The message
            names the fields and the values.
    """

    kind: ClassVar[str]
    """Name of the kind in the entry-point group ``megatron.models``."""
    takes_position_axes: ClassVar[bool] = False
    """Whether models of this kind may have positions with axes, see `has_position_axes`."""

    def _check(self) -> None:
        super()._check()
        if self.has_position_axes and not self.takes_position_axes:
            raise ConfigError(
                f"a model of kind {self.kind!r} does not support {{position_embedding_type:name}} "
                "{position_embedding_type:repr}; use 'rope'",
                vars(self),
            )
        relative = getattr(self, "position_embedding_type", None) == "relative"
        if relative and not isinstance(self, RelativeBiasConfig):
            raise ConfigError(
                f"a model of kind {self.kind!r} does not support {{position_embedding_type:name}} "
                "{position_embedding_type:repr}; use 'learned_absolute'",
                vars(self),
            )

    @property
    def has_position_axes(self) -> bool:
        """Whether a token has a time, a height and a width instead of one position (``mrope``)."""
        return getattr(self, "position_embedding_type", None) == "mrope"

    @abstractmethod
    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns the model's trunks by the prefix of their parameter names, often empty."""

    def trunk(self) -> TrunkSpec:
        """Returns the only trunk.

        Raises:
            ConfigError: The model has several.
        """
        (first, *others) = self.trunks().values()
        if others:
            raise ConfigError(f"a model of kind {self.kind!r} has several trunks, not one")
        return first

    def output(self) -> EmbeddingConfig | None:
        """Returns the configuration of an untied output matrix ``output.weight``, or None."""
        return None

    def stage_split(self, layout: ParallelLayout) -> tuple[range, ...] | None:
        """Returns the layers of each pipeline stage if the model determines them, else None.

        Args:
            layout: Its ``pp`` and ``vpp`` determine the number of stages.

        Raises:
            ConfigError: The model determines another number of stages.
        """
        return None

    @property
    def predicts_tokens(self) -> bool:
        """Whether tokens have logits over the vocabulary. Defaults to yes."""
        return True

    def heads(self) -> Mapping[str, Head]:
        """Returns the heads beside the output matrix, by the prefix of their parameters.

        Defaults to none.
        """
        return {}

    def shared_embedding(self) -> EmbeddingSpec | None:
        """Returns an embedding ``embedding`` that several trunks share, or None."""
        return None

    def multi_token(self) -> tuple[MultiTokenSpec, ...]:
        """Returns the depths of multi-token prediction ``mtp.0``, ``mtp.1``, ...; often none."""
        return ()

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns every parameter by its global name, in the order of the model."""
        found: Parameters = {}
        shared = self.shared_embedding()
        if shared is not None:
            found |= prefixed("embedding", shared.parameters(sequence_parallel))
        for prefix, trunk in self.trunks().items():
            own = trunk.parameters(sequence_parallel)
            found |= prefixed(prefix, own) if prefix else own
        output = self.output()
        if output is not None:
            passes = 1 + len(self.multi_token())
            found |= prefixed("output", output_parameters(output, passes))
        for spec in self.multi_token():
            found |= prefixed(f"mtp.{spec.depth}", spec.parameters(sequence_parallel))
        for prefix, head in self.heads().items():
            found |= prefixed(prefix, head.parameters(sequence_parallel))
        return found

    def state(self) -> dict[str, Sharding]:
        """Returns all state that is not a parameter, by global name."""
        found = {
            f"{prefix}.{name}" if prefix else name: cut
            for prefix, trunk in self.trunks().items()
            for name, cut in trunk.state().items()
        }
        for spec in self.multi_token():
            found |= {f"mtp.{spec.depth}.{name}": cut for name, cut in spec.state().items()}
        return found

    def width_ratios(self) -> dict[str, tuple[float, float]]:
        """Returns the sizes of parameters over those in the model of the learning rate.

        Each pair has the ratios of inputs and outputs, by global name. An optimizer derives the
        learning rate of the parameter from it (`megatron_optim.WidthRatio`). Parameters without an
        entry have the same sizes. Defaults to none.
        """
        return {}

    @cached_property
    def multiply_adds(self) -> MultiplyAdds:
        """Multiply-adds of a forward pass, by token, by query-key pair and by sequence."""
        work, parts = {False: 0, True: 0}, self._parts
        for spec in self.parameters().values():
            work[spec.per_sequence] += spec.multiply_adds
        per_pair = sum(part.multiply_adds_per_pair() for part in parts)
        of_states = sum(part.multiply_adds_of_state() for part in parts)
        return MultiplyAdds(work[False] + of_states, per_pair, work[True])

    def multiply_adds_of_pairs(self, tokens: int, squared_lengths: int) -> int:
        """Returns the multiply-adds of all query-key pairs of some documents, in all layers.

        Args:
            tokens: Number of tokens.
            squared_lengths: Sum of the squared lengths of the documents.
        """
        parts = self._parts
        return sum(part.multiply_adds_of_pairs(tokens, squared_lengths) for part in parts)

    @cached_property
    def auxiliary_losses(self) -> tuple[str, ...]:
        """Names of the auxiliary losses of components, such as routers."""
        return tuple(
            dict.fromkeys(name for part in self._parts for name in part.auxiliary_losses())
        )

    @cached_property
    def counting_layers(self) -> dict[int, Mixer]:
        """The mixers that count values for reports, by global number of the layer."""
        return {
            part.layer_offset + number: sublayer.mixer
            for part in self._parts
            for number, layer in part.layers.items()
            for sublayer in layer
            if sublayer.mixer.counters()
        }

    @cached_property
    def numbered_mixers(self) -> dict[int, tuple[Mixer, ...]]:
        """The mixers of each layer, by global number of the layer."""
        return {
            part.layer_offset + number: tuple(sublayer.mixer for sublayer in layer)
            for part in self._parts
            for number, layer in part.layers.items()
        }

    @cached_property
    def multi_token_losses(self) -> tuple[str, ...]:
        """Names of the losses of multi-token prediction, one for each depth."""
        return tuple(multi_token_loss(spec.depth) for spec in self.multi_token())

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers, each once."""
        found = {id(mixer): mixer for part in self._parts for mixer in part.mixers}
        return tuple(found.values())

    @property
    def _parts(self) -> tuple[TrunkSpec, ...]:
        """The layers of all trunks and of multi-token prediction."""
        return (*self.trunks().values(), *(spec.trunk for spec in self.multi_token()))

    @cached_property
    def embedding(self) -> EmbeddingSpec:
        """The embedding that trunks share, or that of the first trunk that has one.

        Raises:
            ConfigError: The model reads no tokens.
        """
        if (shared := self.shared_embedding()) is not None:
            return shared
        for trunk in self.trunks().values():
            if trunk.embedding is not None:
                return trunk.embedding
        raise ConfigError(f"a model of kind {self.kind!r} reads no tokens")

    @property
    def depth(self) -> int:
        """Number of layers of all trunks together, without those of multi-token prediction."""
        return sum(len(trunk.layers) for trunk in self.trunks().values())

    def cached(self, tp: int) -> dict[int, CacheSpec]:
        """Returns what each layer of the last trunk, which decodes, caches on one of ``tp`` ranks.

        Layers are numbered as for dropout: over all trunks. Those that cache nothing are left out.

        Raises:
            ConfigError: A mixer attends to other tokens and caches nothing, so it cannot decode.
        """
        *_, trunk = self.trunks().values()
        cached = {}
        for number, layer in trunk.layers.items():
            for sublayer in layer:
                found = sublayer.mixer.cached(tp)
                if found is not None:
                    cached[trunk.layer_offset + number] = found
                elif sublayer.mixer.multiply_adds_per_pair() and not sublayer.mixer.reads_source:
                    raise ConfigError(
                        f"layer {number} cannot decode with a cache: its {sublayer.name}, "
                        f"{type(sublayer.mixer).__name__}, attends to other tokens and does not "
                        "define Mixer.cached"
                    )
        return cached

    @property
    def attention_heads(self) -> int:
        """Largest number of heads of a layer; 0 without attention."""
        return max((mixer.heads for mixer in self.mixers), default=0)

    @property
    def expert_parallel(self) -> bool:
        """Whether the model has experts that can be divided over ranks."""
        return any(mixer.expert_parallel for mixer in self.mixers)

    @property
    def uses_noise(self) -> bool:
        """Whether training needs a `Dropout` even without dropout, for the key of its noise."""
        return any(mixer.uses_noise for mixer in self.mixers)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses a layout that cannot cut a component.

        Raises:
            ConfigError: A component does not fit; the message names fields of configuration and
                layout.
        """
        parts: tuple[Mixer | MultiTokenSpec, ...] = (*self.mixers, *self.multi_token())
        for part in parts:
            part.check_layout(layout)

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns why the model does not support a training feature, or None."""
        parts: tuple[Mixer | MultiTokenSpec, ...] = (*self.mixers, *self.multi_token())
        reasons = (part.unsupported_reason(feature) for part in parts)
        return next((reason for reason in reasons if reason is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as a plain JSON value."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns every field as JSON text, one field a line."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds a configuration from plain values.

        Raises:
            ConfigError: Keys are unknown or missing, of which one line names all, with the nearest
                key for an unknown one; or values do not fit.
        """
        known = [each.name for each in dataclasses.fields(cls)]
        problems = []
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                problems.append(f"unknown model configuration key {reprlib.repr(key)}{hint}")
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in values]:
            problems.append(f"the model configuration lacks {', '.join(missing)}")
        if problems:
            more = len(problems) - _SHOWN
            rest = [f"and {more} more"] if more > 0 else []
            raise ConfigError("; ".join([*problems[:_SHOWN], *rest]))
        return cls(**values)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Self:
        """Builds a configuration from JSON text, or from the parsed object."""
        if isinstance(text, Mapping):
            return cls.from_dict(text)
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the model configuration is not JSON: {error}") from None
        except RecursionError:
            raise ConfigError("the model configuration is nested too deeply to be read") from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"the model configuration is a JSON {type(values).__name__}, not a map"
            )
        return cls.from_dict(values)
