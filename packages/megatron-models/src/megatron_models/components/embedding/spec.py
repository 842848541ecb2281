"""Positions, embeddings and the output layer as plain data.

Importing this module does not import torch.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from megatron_parallel import Sharding
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, VocabSpec

from megatron_models.components.fields import flag
from megatron_models.components.mixer import (
    LayerPass,
    Parameters,
    ParameterSpec,
    parameters_of,
    prefixed,
)
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError

PositionEmbedding = Literal[
    "learned_absolute", "sinusoidal", "rope", "mrope", "alibi", "relative", "none"
]


@dataclass(frozen=True, kw_only=True)
class PositionConfig(StreamConfig):
    """Type and number of the positions of a model."""

    max_position_embeddings: int = field(
        metadata=flag(
            "--max-position-embeddings",
            "longest sequence that the model supports",
            positive=True,
            unit="tokens",
            small=16,
        )
    )
    position_embedding_type: PositionEmbedding = field(
        default="learned_absolute",
        metadata=flag(
            "--position-embedding-type",
            "learned absolute positions added to the embedding, fixed ones (sinusoidal, as in the "
            "original transformer), rotary positions in attention (rope, or mrope with a time, a "
            "height and a width of each token), linear biases of attention by distance (alibi), "
            "biases of attention that are learned for relative positions (relative, as in T5), "
            "or none",
            choices=get_args(PositionEmbedding),
        ),
    )

    @property
    def has_rotation(self) -> bool:
        """Whether attention rotates queries and keys by positions."""
        return self.position_embedding_type in ("rope", "mrope")

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that there are positions for."""
        return self.max_position_embeddings

    def check_sequence_length(self, length: int) -> None:
        """Raises ConfigError if a sequence of ``length`` tokens exceeds the number of positions."""
        if length > self.longest_sequence:
            unused = self.max_position_embeddings - self.longest_sequence
            less = f" less the {unused} that no token has" if unused else ""
            raise ConfigError(
                f"a sequence of {length} tokens is longer than max_position_embeddings "
                f"{self.max_position_embeddings}{less}; shorten it or build the model with more "
                "positions"
            )


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(PositionConfig):
    """The vocabulary of a model."""

    vocab_size: int = field(
        metadata=flag(
            "--vocab-size",
            "number of tokens in the vocabulary, without padding",
            positive=True,
            unit="tokens",
            small=150,
        )
    )
    make_vocab_size_divisible_by: int = field(
        default=128,
        metadata=flag(
            "--make-vocab-size-divisible-by",
            "multiple to which the vocabulary is padded, for every tensor-parallel size",
            positive=True,
            no_effect=True,
            unit="tokens",
        ),
    )
    embedding_multiplier: float = field(
        default=1.0,
        metadata=flag(
            "--embedding-multiplier",
            "factor of token embeddings, rounded to the dtype of the model (Gemma: square root of "
            "hidden_size) (our name)",
            positive=True,
        ),
    )

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary size rounded up to a multiple of ``make_vocab_size_divisible_by``."""
        unit = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // unit) * unit


@dataclass(frozen=True, kw_only=True)
class OutputConfig(EmbeddingConfig):
    """What is done with the logits of a model."""

    logits_scaling: float = field(
        default=1.0,
        metadata=flag(
            "--logits-scaling", "divisor of the logits (Granite) (our name)", positive=True
        ),
    )
    final_logit_softcapping: float = field(
        default=0.0,
        metadata=flag(
            "--final-logit-softcapping",
            "bound of the logits x, which become bound * tanh(x / bound) (Gemma 2); 0: none (our "
            "name)",
            nonnegative=True,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TiedOutputConfig(OutputConfig):
    """Whether the output matrix is the token embedding."""

    untie_embeddings_and_output_weights: bool = field(
        default=False,
        metadata=flag(
            "--untie-embeddings-and-output-weights",
            "separate output matrix instead of the token embedding",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec(EmbeddingConfig, NormConfig):
    """Token embeddings, plus learned position embeddings if the model has them.

    The sum may also have embeddings of token types, and a norm after it (BERT).

    Attributes:
        num_tokentypes: Number of token types; 0: there are no embeddings of token types.
        position_offset: Index of the embedding of the first position.
        embedding_norm: Whether a norm follows the sum.
        is_output_weight: Whether the token embeddings are the output matrix too.
        tied_over_stages: Whether another pipeline stage holds them too.
        tied_axis: Axis of the pipeline ranks of these stages (`Sharding.tied`).
        positions_tied_axis: Axis of the pipeline ranks that hold the learned positions too.
        output_only: Whether this is the last stage, which uses the token embeddings as output
            matrix only.
        positions_tied_over_stages: Whether another pipeline stage holds the learned positions too.
        output_passes: Number of times that the output layer runs for each token: once, and once
            for each depth of multi-token prediction.
    """

    num_tokentypes: int = 0
    position_offset: int = 0
    embedding_norm: bool = False
    is_output_weight: bool = False
    tied_over_stages: bool = False
    tied_axis: str = "embedding"
    output_only: bool = False
    positions_tied_over_stages: bool = False
    positions_tied_axis: str = "embedding"
    output_passes: int = 1

    @property
    def word(self) -> VocabSpec:
        """The token embeddings."""
        init = Init(scale=self.init_method_std)
        return VocabSpec(self.vocab_size, self.hidden_size, self.padded_vocab_size, init=init)

    def position(self, sequence_parallel: bool = False) -> Sharding | None:
        """Returns the sharding of learned positions ``[positions, h]``, which every rank holds."""
        if self.output_only or self.position_embedding_type != "learned_absolute":
            return None
        shape = (self.max_position_embeddings, self.hidden_size)
        partial = "tp" if sequence_parallel else None
        init = Init(scale=self.init_method_std)
        tied = self.positions_tied_axis if self.positions_tied_over_stages else None
        return Sharding(shape, init=init, partial=partial, tied=tied)

    def token_types(self, sequence_parallel: bool = False) -> Sharding | None:
        """Returns the sharding of token types ``[types, h]``, which every rank holds."""
        if self.output_only or not self.num_tokentypes:
            return None
        shape = (self.num_tokentypes, self.hidden_size)
        partial = "tp" if sequence_parallel else None
        return Sharding(shape, init=Init(scale=self.init_method_std), partial=partial)

    @property
    def norm(self) -> NormSpec | None:
        """The norm of the sum of embeddings, on a stage that embeds tokens, or None."""
        if self.output_only or not self.embedding_norm:
            return None
        return self.component(NormSpec)

    def activation_bytes(self, layer_pass: LayerPass) -> int:
        """Returns the bytes saved for the backward pass: token ids, token types and the norm's."""
        ids = 2 if self.token_types() is not None else 1
        saved = ids * 8 * layer_pass.tokens
        if self.norm is not None:
            saved += self.norm.activation_bytes(layer_pass)
        return saved

    def word_sharding(self) -> Sharding:
        """Returns the sharding of the token embeddings."""
        tied = self.tied_axis if self.tied_over_stages else None
        return replace(self.word.shardings()["weight"], tied=tied)

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters; tied token embeddings have the multiply-adds of the output."""
        passes = self.output_passes if self.is_output_weight else 0
        multiply_adds = passes * self.hidden_size * self.padded_vocab_size
        word = ParameterSpec(self.word_sharding(), multiply_adds, looked_up=True)
        found = {"word.weight": word}
        position = self.position(sequence_parallel)
        if position is not None:
            found["position.weight"] = ParameterSpec(position, looked_up=True)
        token_types = self.token_types(sequence_parallel)
        if token_types is not None:
            found["token_types.weight"] = ParameterSpec(token_types, looked_up=True)
        if self.norm is not None:
            found |= prefixed("norm", self.norm.parameters(sequence_parallel))
        return found


def output_spec(config: EmbeddingConfig) -> ColumnSpec:
    """Returns an untied output matrix."""
    return ColumnSpec(
        config.hidden_size,
        (config.vocab_size,),
        bias=False,
        padded=config.padded_vocab_size,
        init=Init(scale=config.init_method_std),
        role="output_layer",
    )


def output_parameters(config: EmbeddingConfig, passes: int = 1) -> Parameters:
    """Returns the parameters of an untied output matrix; padding counts as multiply-adds.

    Args:
        config: The model's configuration.
        passes: Number of times that the matrix is used for each token.
    """
    found = parameters_of(output_spec(config), False)
    multiply_adds = passes * config.hidden_size * config.padded_vocab_size
    return {name: replace(spec, multiply_adds=multiply_adds) for name, spec in found.items()}
