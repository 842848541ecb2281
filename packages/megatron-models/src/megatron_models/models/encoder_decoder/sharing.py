"""Parameters of an encoder-decoder that several pipeline stages hold.

Encoder and decoder may share an embedding, which may be the output matrix too. All layers of a side
share its biases by relative position.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_parallel import Mesh
from torch import nn

from megatron_models.components.embedding.spec import EmbeddingSpec
from megatron_models.components.layer import TrunkSpec
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig
from megatron_models.stages import EncoderDecoderStagePlan, StagePlan


@dataclass(frozen=True)
class SharedParameters:
    """The axes of the pipeline ranks that share parameters, None for a single rank.

    Attributes:
        word: Axis of the token embeddings.
        positions: Axis of the learned positions.
        sides: Axes of the biases by relative position of encoder and decoder.
    """

    word: str | None
    positions: str | None
    sides: dict[str, str | None]

    @classmethod
    def on(
        cls, config: EncoderDecoderConfig, plan: EncoderDecoderStagePlan, mesh: Mesh
    ) -> "SharedParameters":
        """Adds the axes to a mesh. Every rank of it adds the same ones, in the same order."""

        def axis(stages: Iterable[int]) -> str | None:
            return mesh.add_stage_group({mesh.layout.pipeline_rank_of(each) for each in stages})

        embeds, shared = plan.embedding_stages, config.shared_embedding()
        word, positions, sides = None, None, dict[str, str | None]()
        if shared is not None:
            word = axis((*embeds, plan.count - 1) if shared.is_output_weight else embeds)
            positions = axis(embeds)
        if config.has_relative_bias and plan.count > 1:
            first = plan.encoder_stages
            sides["encoder"] = axis(range(first))
            sides["decoder"] = axis(range(first, plan.count))
        return cls(word, positions, sides)

    def embedding(
        self, config: EncoderDecoderConfig, plan: EncoderDecoderStagePlan
    ) -> EmbeddingSpec | None:
        """Returns the shared embedding of a stage, or None if the stage does not need it."""
        shared, embeds = config.shared_embedding(), plan.stage in plan.embedding_stages
        if shared is None:
            return None
        is_output = shared.is_output_weight and plan.stage == plan.count - 1
        if not (embeds or is_output):
            return None
        return replace(
            shared,
            is_output_weight=is_output,
            output_only=not embeds,
            tied_over_stages=self.word is not None,
            tied_axis=self.word or "",
            positions_tied_over_stages=self.positions is not None,
            positions_tied_axis=self.positions or "",
        )

    def side(self, name: str, trunk: TrunkSpec, own: StagePlan) -> TrunkSpec:
        """Returns a stage of the encoder or of the decoder."""
        stage = trunk.stage(own.layers, first=own.first, last=own.last)
        if stage.relative_bias is None:
            return stage
        bias = replace(stage.relative_bias, tied_axis=self.sides.get(name) or "")
        return replace(stage, relative_bias=bias)


def share_between_chunks(chunks: Sequence[nn.Module]) -> None:
    """Makes parameters with equal names of several stages on one rank the same."""
    found: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        for name, parameter in list(chunk.named_parameters()):
            shared = found.setdefault(name, parameter)
            if shared is not parameter:
                owner, _, own = name.rpartition(".")
                chunk.get_submodule(owner).register_parameter(own, shared)
