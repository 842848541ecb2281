"""A layer and a trunk as plain data: sublayers with their norms around a residual stream.

Hybrid models, patterns of sliding windows and heterogeneous layers are other tuples of sublayers.
Importing this module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_parallel import Sharding

from megatron_models.components.attention.span import Span
from megatron_models.components.embedding.spec import EmbeddingSpec
from megatron_models.components.mixer import (
    BytesByPart,
    LayerPass,
    Mixer,
    Parameters,
    prefixed,
    sum_by_part,
)
from megatron_models.components.norm.spec import NormSpec
from megatron_models.components.relative_bias.spec import RelativeBiasSpec
from megatron_models.components.rotary.spec import RotarySpec


@dataclass(frozen=True)
class Sublayer:
    """A mixer beside the residual stream: ``sum(x + factor * drop(after(mixer(before(x)))))``.

    Each of the three norms ``before``, ``after`` and ``sum`` is optional. ``before`` alone is
    pre-LN (Xiong et al., 2020), ``sum`` alone is post-LN (Vaswani et al., 2017; BERT), ``before``
    and ``after`` are a sandwich (Ding et al., 2021), ``after`` alone is that of OLMo 2.

    Parallel sublayers read the same residual stream, to which the sum of their outputs is added:
    ``x + attention(before(x)) + mlp(before(x))`` (Wang and Komatsuzaki, 2021; GPT-NeoX).

    Attributes:
        name: Name of the mixer in the layer. Its norms are ``<name>_norm``, ``<name>_norm_after``
            and ``<name>_norm_sum``.
        mixer: Description of the mixer.
        site: Number of the dropout site of its output (`megatron_models.components.dropout`).
        norm: Norm of the mixer's input, or None.
        norm_after: Norm of the mixer's output, or None.
        norm_sum: Norm of the residual stream after the addition, or None.
        multiplier: Factor of the mixer's output.
        parallel: Whether it reads the same residual stream as the sublayer before it.
        shares_norm: Whether a parallel sublayer has no norm of its own and reads the normed input
            of the sublayer before it.
    """

    name: str
    mixer: Mixer
    site: int
    norm: NormSpec | None = None
    norm_after: NormSpec | None = None
    norm_sum: NormSpec | None = None
    multiplier: float = 1.0
    parallel: bool = False
    shares_norm: bool = False

    @property
    def norms(self) -> dict[str, NormSpec]:
        """The norms by their names in the layer."""
        found = {
            f"{self.name}_norm": self.norm,
            f"{self.name}_norm_after": self.norm_after,
            f"{self.name}_norm_sum": self.norm_sum,
        }
        return {name: norm for name, norm in found.items() if norm is not None}

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of norms and mixer, by their names in the layer."""
        norms = {
            name: prefixed(name, norm.parameters(sequence_parallel))
            for name, norm in self.norms.items()
        }
        first = norms.pop(f"{self.name}_norm", {})
        found = first | prefixed(self.name, self.mixer.parameters(sequence_parallel))
        for own in norms.values():
            found |= own
        return found

    def state(self) -> dict[str, Sharding]:
        """Returns the mixer's state that is not a parameter, by its names in the layer."""
        return {f"{self.name}.{name}": cut for name, cut in self.mixer.state().items()}

    def activations(self, layer_pass: LayerPass, width: int) -> BytesByPart:
        """Returns the bytes that norms, mixer and dropout save, by submodule.

        Args:
            layer_pass: The micro-batch, how it is cut, and the bytes that operations save.
            width: Width of the residual stream.
        """
        saved_bytes, stream = layer_pass.saved_bytes, layer_pass.stream_tokens * width
        first = f"{self.name}_norm"
        terms = {
            name: norm.activation_bytes(layer_pass, shares_input=self.parallel and name == first)
            for name, norm in self.norms.items()
        }
        reader = self.mixer.input_saved_by(layer_pass)
        if reader is not None:
            recomputed = self.norm is not None and layer_pass.recompute.selects("layernorm")
            saved, size = not recomputed and not self.shares_norm, stream * saved_bytes.activation
            if saved_bytes.linear_input and self.mixer.converts_input(layer_pass):
                cut = layer_pass.sequence_parallel and layer_pass.tp > 1
                gathered = cut and self.mixer.gathers_input
                saved, size = not recomputed, saved_bytes.of_linear(stream, gathered=gathered)
            terms[f"{self.name}.{reader}"] = size if saved else 0
        for part, size in self.mixer.activations(layer_pass).items():
            terms[f"{self.name}.{part}" if part else self.name] = size
        terms["dropout"] = stream * saved_bytes.dropout_mask
        return terms


Layer = tuple[Sublayer, ...]
"""The sublayers of one layer, in order."""


def parallel_groups(layer: Layer) -> tuple[Layer, ...]:
    """Returns the sublayers in groups that read the same residual stream."""
    return _groups(layer, [sublayer.parallel for sublayer in layer])


def norm_groups(layer: Layer) -> tuple[Layer, ...]:
    """Returns parallel sublayers in groups that read the same normed input."""
    return _groups(layer, [sublayer.shares_norm for sublayer in layer])


def _groups(layer: Layer, joined: Sequence[bool]) -> tuple[Layer, ...]:
    starts = [number for number, joins in enumerate(joined) if not joins or number == 0]
    ends = [*starts[1:], len(layer)]
    return tuple(layer[start:end] for start, end in zip(starts, ends, strict=True))


def layer_parameters(layer: Layer, sequence_parallel: bool = False) -> Parameters:
    """Returns the parameters of a layer, by their names in it."""
    found: Parameters = {}
    for sublayer in layer:
        found |= sublayer.parameters(sequence_parallel)
    return found


@dataclass(frozen=True)
class TrunkSpec:
    """Embedding, layers and final norm: a decoder-only model, or one side of an encoder-decoder.

    Attributes:
        embedding: Embedding of tokens and positions; None if another stage has it.
        layers: Layers of the trunk or of one stage, by number.
        final_norm: None if another stage has it, or there is none.
        width: Width of the residual stream.
        layer_offset: Added to a layer's number for dropout, which counts over several trunks.
        embedding_site: Number of the dropout site of the embedding.
        takes_tokens: Whether the embedding, if there is one, embeds the input of this stage.
        relative_bias: Biases of attention by relative position, which every stage holds; or None.
    """

    embedding: EmbeddingSpec | None
    layers: Mapping[int, Layer]
    final_norm: NormSpec | None
    width: int
    layer_offset: int = 0
    embedding_site: int = 0
    takes_tokens: bool = True
    relative_bias: RelativeBiasSpec | None = None

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns all parameters by name, in the order of the module."""
        found: Parameters = {}
        if self.embedding is not None:
            found |= prefixed("embedding", self.embedding.parameters(sequence_parallel))
        if self.relative_bias is not None:
            found |= prefixed("relative_bias", self.relative_bias.parameters())
        known: dict[int, Parameters] = {}  # by layer: equal layers are one object
        for number, layer in self.layers.items():
            if id(layer) not in known:
                known[id(layer)] = layer_parameters(layer, sequence_parallel)
            found |= prefixed(f"layers.{number}", known[id(layer)])
        if self.final_norm is not None:
            found |= prefixed("final_norm", self.final_norm.parameters(sequence_parallel))
        return found

    def state(self) -> dict[str, Sharding]:
        """Returns all state that is not a parameter, by name."""
        return {
            f"layers.{number}.{name}": cut
            for number, layer in self.layers.items()
            for sublayer in layer
            for name, cut in sublayer.state().items()
        }

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers."""
        return tuple(sublayer.mixer for layer in self.layers.values() for sublayer in layer)

    def rotations(self) -> tuple[RotarySpec, ...]:
        """Returns the rotations of mixers, each once."""
        return tuple(dict.fromkeys(each for mixer in self.mixers for each in mixer.rotations()))

    def multiply_adds_per_pair(self) -> int:
        """Returns the multiply-adds of one query-key pair, in all layers together."""
        return sum(mixer.multiply_adds_per_pair() for mixer in self.mixers)

    def multiply_adds_of_state(self) -> int:
        """Returns the multiply-adds of one token with recurrent states, in all layers together."""
        return sum(mixer.multiply_adds_of_state() for mixer in self.mixers)

    def multiply_adds_of_pairs(self, tokens: int, squared_lengths: int) -> int:
        """Returns the multiply-adds of all query-key pairs, with the arguments of `Mixer`."""
        return sum(mixer.multiply_adds_of_pairs(tokens, squared_lengths) for mixer in self.mixers)

    def spans(self) -> tuple[Span, ...]:
        """Returns the spans of mixers, each once."""
        return tuple(dict.fromkeys(each for mixer in self.mixers for each in mixer.spans()))

    def layer_activations(self, number: int, layer_pass: LayerPass) -> BytesByPart:
        """Returns the bytes that one layer saves for one micro-batch, by submodule."""
        layer = self.layers[number]
        return sum_by_part(sublayer.activations(layer_pass, self.width) for sublayer in layer)

    def auxiliary_losses(self) -> tuple[str, ...]:
        """Returns the names of the auxiliary losses of mixers, each once."""
        return tuple(
            dict.fromkeys(name for mixer in self.mixers for name in mixer.auxiliary_losses())
        )

    def stage(self, layers: Sequence[int], *, first: bool, last: bool) -> "TrunkSpec":
        """Returns the part of one pipeline stage.

        Args:
            layers: Global layer numbers of the stage.
            first: Whether the stage has the embedding.
            last: Whether the stage has the final norm.
        """
        return replace(
            self,
            embedding=self.embedding if first else None,
            layers={number: self.layers[number] for number in layers},
            final_norm=self.final_norm if last else None,
            takes_tokens=first,
        )
