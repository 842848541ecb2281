"""An encoder and a decoder that attends to it, whole or as one stage of a pipeline."""

from collections.abc import Sequence
from dataclasses import replace

import megatron_parallel
import torch
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import Mesh, initialize_parameters
from megatron_parallel.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.attention.rotary import RotaryTable
from megatron_models.components.context import Context
from megatron_models.components.dropout import Dropout, StageDropout
from megatron_models.components.embedding.output import losses_or_logits
from megatron_models.components.embedding.spec import output_spec
from megatron_models.components.trunk import Trunk
from megatron_models.errors import ConfigError
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig
from megatron_models.placement import Placement
from megatron_models.stages import StagePlan, part_length, plan_encoder_decoder_stage


class EncoderDecoder(nn.Module):
    """An encoder and a decoder, cut over the tensor-parallel and pipeline axes of a mesh.

    On a mesh with ``pp=1`` it is the whole model. Otherwise it is one stage: the encoder's come
    first, then the decoder's (Megatron's order). A stage of the encoder passes on its stream; the
    first of the decoder embeds the decoder's own tokens; its stages pass on two tensors, their
    stream and the encoder's output, whose gradient thus gathers the parts of all decoder layers on
    its way back. All stages keep the whole model's parameter names.

    The encoder attends in both directions, the decoder to itself and those before, and every token
    of it to the encoder's whole text (Vaswani et al. 2017, normalised before each part). The two
    embeddings and the output matrix are three weights.

    Initial weights depend on the seed and each parameter's global name, not on the layout. Built on
    the meta device the model has no values; call `initialize` after moving it with ``to_empty``.

    Args:
        config: the model's shape.
        place: where it lives, over which ranks it is cut, and how it computes; a mesh stands for
            `Placement(mesh)`.
        chunk: which of this rank's ``vpp`` stages, in the order of ``mesh.layout.stages``.
        encoder_stages: how many of the pipeline's stages the encoder has, by default half of them;
            each half is cut evenly over its stages.
        seed: of the initial weights.

    Attributes:
        stage: number of this stage in the pipeline; 0 for a whole model.
        encoder: this stage's part of the encoder, None on a stage of the decoder.
        decoder: likewise.

    Raises:
        LayoutError: query groups, feed-forward width or heads do not divide over the tensor axis;
            recomputation that the layout has no use for.
        ConfigError: a chunk that the pipeline does not have; a half without a stage, or layers that
            do not divide over the stages of their half; context parallelism.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        place: Placement | Mesh,
        *,
        chunk: int = 0,
        encoder_stages: int | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        place = Placement.of(place)
        mesh, layout = place.mesh, place.mesh.layout
        if layout.cp > 1:
            raise ConfigError(f"an encoder-decoder does not do context parallelism: cp={layout.cp}")
        self.recompute = place.recompute
        self.recompute.check(layout, sequence_parallel=place.sequence_parallel)
        self.config, self.mesh, self.dtype = config, mesh, place.dtype
        self.sequence_parallel, self.sequence_parts = place.sequence_parallel, place.sequence_parts
        self.tp = mesh.axis("tp")
        depths = config.encoder_num_layers, config.num_layers
        plan = plan_encoder_decoder_stage(
            *depths, layout, mesh.axis("pp").index, chunk, encoder_stages
        )
        self.stage, self.encoder_stages = plan.stage, plan.encoder_stages
        self.rotary: RotaryTable | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryTable(config.component(AttentionConfig), place)
        trunks = config.trunks()

        def side(name: str, own: StagePlan | None) -> Trunk | None:
            if own is None:
                return None
            return Trunk(trunks[name].stage(own.layers, first=own.first, last=own.last), place)

        self.encoder = side("encoder", plan.encoder)
        self.decoder = side("decoder", plan.decoder)
        self.output: ColumnParallelLinear | None = None
        if plan.decoder is not None and plan.decoder.last:
            self.output = place.column(output_spec(config))
        if place.on.type != "meta":
            self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Give every parameter its initial value, and compute the rotary table."""
        initialize_parameters(self, seed=seed, mesh=self.mesh)
        if self.rotary is not None:
            self.rotary.reset()

    def passed(
        self, stage: int, batch_size: int, source_length: int, target_length: int
    ) -> tuple["megatron_parallel.Passed", ...]:
        """What a stage that is not the last passes on for one micro-batch, any stage of them.

        Args:
            stage: its number in the pipeline.
            batch_size: sequences of the micro-batch.
            source_length: of the encoder's text, in tokens.
            target_length: of the decoder's text.

        Returns:
            Shapes of the encoder's stream; or of the decoder's and of the encoder's output.

        Raises:
            ConfigError: sequence parallelism cannot cut one of the lengths.
        """
        encoder_only = stage < self.encoder_stages
        lengths = (source_length,) if encoder_only else (target_length, source_length)
        width = self.config.hidden_size
        parts = [part_length(length, self.sequence_parts) for length in lengths]
        return tuple(
            megatron_parallel.Passed((part, batch_size, width), self.dtype) for part in parts
        )

    def forward(
        self,
        *received: Float[Tensor, "_ b h"],
        source: Int[Tensor, "b t"] | None = None,
        target: Int[Tensor, "b s"] | None = None,
        source_padding: Bool[Tensor, "b t"] | None = None,
        labels: Int[Tensor, "b s"] | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Tensor, "..."] | tuple[Float[Tensor, "_ b h"], Float[Tensor, "_ b h"]]:
        """Run this stage.

        All stages of a pipeline may be called with the same keyword arguments.

        Args:
            *received: what the stage before returned: nothing on the first stage, the encoder's
                stream or output ``[t, b, h]``, or the decoder's stream ``[s, b, h]`` and the
                encoder's output; with sequence parallelism this rank's part of each.
            source: the encoder's tokens; the first stage reads them.
            target: the decoder's tokens, for instance the labels one place later; the decoder's
                first stage reads them.
            source_padding: True where the encoder's text is padding, which nobody attends to; by
                default none is. Every stage reads it.
            labels: the token to predict at each place of the target; -100 marks a place without
                loss. Only the last stage reads them.
            dropout: what is dropped; nothing by default. Its key covers the longer of both texts.

        Returns:
            The encoder's stream; the decoder's and the encoder's output; from the last stage the
            loss of each token, minus the log-probability of its label in nats, ``[b, s]``, or
            without labels logits ``[s, b, padded vocabulary / tp]``, padding tokens at -inf.

        Raises:
            ConfigError: another number of tensors than the stage before passes on; tokens missing;
                texts of unequally many sequences; more tokens than the model has positions, or the
                key of dropout covers; a length that sequence parallelism cannot cut.
        """
        self._check_received(received)
        encoder, decoder = self.encoder, self.decoder
        if encoder is None:
            encoded = received[-1]
        else:
            x = received[0] if encoder.embedding is None else self._tokens("source", source)
            mask = Mask(causal=False, document_ids=_documents(source_padding))
            encoded = encoder(x, self._context(x, mask, dropout))
        if decoder is None:
            return encoded
        x = received[0] if decoder.embedding is None else self._tokens("target", target)
        context = self._context(x, Mask(), dropout)
        cross_mask = self._cross_mask(x, encoded, source_padding)
        x = decoder(x, replace(context, encoded=encoded, cross_mask=cross_mask))
        if self.output is None:
            return x, encoded
        return losses_or_logits(self.output(x), labels, self.tp, self.config.vocab_size)

    def _check_received(self, received: tuple[Tensor, ...]) -> None:
        """Refuse another number of tensors than the stage before passes on."""
        wanted = min(self.stage, 1) + (self.stage > self.encoder_stages)
        if len(received) != wanted:
            what = ("no tensor", "1 tensor of the encoder", "2 tensors, decoder's and encoder's")
            raise ConfigError(
                f"stage {self.stage}, with {self.encoder_stages} stages of the encoder, takes "
                f"{what[wanted]}, not {len(received)}"
            )

    def _tokens(self, name: str, tokens: Tensor | None) -> Tensor:
        """The tokens that this stage embeds."""
        if tokens is None:
            raise ConfigError(f"stage {self.stage} embeds {name} tokens: give `{name}` [b, s]")
        return tokens

    def _length(self, x: Tensor) -> int:
        """Tokens of a whole text, from tokens ``[b, s]`` or a stream ``[part, b, h]``."""
        return x.shape[0] * self.sequence_parts if x.is_floating_point() else x.shape[1]

    def _context(self, x: Tensor, mask: Mask, dropout: Dropout | None) -> Context:
        """What the layers of a half share, but for what the encoder made."""
        length = self._length(x)
        part_length(length, self.sequence_parts)
        self.config.check_sequence_length(length)
        angles = None if self.rotary is None else self.rotary(length, 0, None)
        dropped = self._dropout(dropout, length)
        mask = mask.prepare(length, length, device=x.device)
        return Context(mask, angles, dropout=dropped, recompute=self.recompute)

    def _cross_mask(self, x: Tensor, encoded: Tensor, padding: Tensor | None) -> Mask:
        """Every token of the decoder sees the encoder's text and not its padding."""
        queries, keys, batch = self._length(x), self._length(encoded), encoded.shape[1]
        given = x.shape[1 if x.is_floating_point() else 0]
        if given != batch:
            raise ConfigError(f"the target has {given} sequences and the source {batch}")
        if padding is None:
            return Mask(causal=False)
        if tuple(padding.shape) != (batch, keys):
            raise ConfigError(
                f"source_padding is {list(padding.shape)} for a source of {[batch, keys]}"
            )
        text = torch.zeros(batch, queries, dtype=torch.int32, device=padding.device)
        mask = Mask(causal=False, document_ids=_documents(padding), query_document_ids=text)
        return mask.prepare(queries, keys, device=x.device)

    def _dropout(self, given: Dropout | None, length: int) -> StageDropout | None:
        """Dropout of one of the texts, whose places are the first of the key."""
        if given is None:
            return None
        covered = given.key.word0.shape[0]
        if covered < length:
            raise ConfigError(
                f"the key of dropout covers {covered} positions of a text of {length}: make it for "
                "the longer of source and target"
            )
        own = replace(given, key=given.key.narrow(0, length))
        return StageDropout.of(own, self.tp if self.sequence_parallel else None)


def _documents(padding: Bool[Tensor, "b t"] | None) -> Int[Tensor, "b t"] | None:
    """Padding as the mask contract has it: documents 0, and -1 where there is none."""
    return None if padding is None else -padding.to(torch.int32)


def encoder_decoder_chunks(
    config: EncoderDecoderConfig,
    place: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    seed: int = 1234,
) -> list[EncoderDecoder]:
    """Build all stages of this rank, one `EncoderDecoder` for each of its ``vpp`` chunks.

    Raises:
        ConfigError: a ``split``, as each half is cut evenly over its stages; or as for the class.
    """
    if split is not None:
        raise ConfigError("an encoder-decoder cuts each half evenly over its stages: give no split")
    place = Placement.of(place)
    numbers = range(place.mesh.layout.vpp)
    return [EncoderDecoder(config, place, chunk=chunk, seed=seed) for chunk in numbers]
