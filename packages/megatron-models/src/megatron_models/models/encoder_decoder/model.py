"""An encoder and a decoder that attends to it, whole or as one stage of a pipeline."""

from collections.abc import Sequence
from dataclasses import replace

import megatron_parallel
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import Mesh, RecomputeConfig, initialize_parameters
from megatron_parallel.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_models.cache import KVCache
from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.attention.rotary import RotaryTable
from megatron_models.components.context import Context
from megatron_models.components.dropout import Dropout, StageDropout
from megatron_models.components.embedding.output import (
    mask_padding_logits,
    select_tokens,
    token_losses,
)
from megatron_models.components.embedding.spec import output_spec
from megatron_models.components.trunk import Trunk
from megatron_models.errors import ConfigError
from megatron_models.models.decoding import DecodingModel, DecodingPass
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig
from megatron_models.models.encoder_decoder.masks import documents, mask_of_source
from megatron_models.placement import Placement
from megatron_models.stages import StagePlan, plan_encoder_decoder_stage, sequence_shard_length


class EncoderDecoder(DecodingModel):
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
        placement: mesh, dtype, device and options; a mesh alone is short for
            `Placement(mesh)`.
        chunk: which of this rank's ``vpp`` stages, in the order of ``mesh.layout.stages``.
        encoder_stages: how many of the pipeline's stages the encoder has, by default half of them;
            each half is cut evenly over its stages.
        seed: of the initial weights.

    Attributes:
        stage: number of this stage in the pipeline; 0 for a whole model.
        last: whether it gives logits and losses.
        encoder: this stage's part of the encoder, None on a stage of the decoder.
        decoder: likewise.

    Raises:
        LayoutError: query groups, feed-forward width or heads do not divide over the tensor axis;
            recomputation that the layout has no use for.
        ConfigError: a chunk that the pipeline does not have; a half without a stage, or layers that
            do not divide over the stages of their half; context parallelism.
    """

    config: EncoderDecoderConfig
    reads_source = True

    def __init__(
        self,
        config: EncoderDecoderConfig,
        placement: Placement | Mesh,
        *,
        chunk: int = 0,
        encoder_stages: int | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        placement = Placement.resolve(placement)
        mesh, layout = placement.mesh, placement.mesh.layout
        if layout.cp > 1:
            raise ConfigError(f"an encoder-decoder does not do context parallelism: cp={layout.cp}")
        self.recompute, self.vocabulary_loss = placement.recompute, placement.vocabulary_loss
        self.recompute.check(layout, sequence_parallel=placement.sequence_parallel)
        self.config, self.mesh, self.dtype = config, mesh, placement.dtype
        self.sequence_parallel, self.sequence_parallel_size = (
            placement.sequence_parallel,
            placement.sequence_parallel_size,
        )
        self.tp = mesh.axis("tp")
        depths = config.encoder_num_layers, config.num_layers
        plan = plan_encoder_decoder_stage(
            *depths, layout, mesh.axis("pp").index, chunk, encoder_stages
        )
        self.stage, self.encoder_stages = plan.stage, plan.encoder_stages
        self.rotary: RotaryTable | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryTable(config.component(AttentionConfig), placement)
        trunks = config.trunks()

        def side(name: str, own: StagePlan | None) -> Trunk | None:
            if own is None:
                return None
            return Trunk(trunks[name].stage(own.layers, first=own.first, last=own.last), placement)

        self.encoder = side("encoder", plan.encoder)
        self.decoder = side("decoder", plan.decoder)
        self.output: ColumnParallelLinear | None = None
        self.last = plan.decoder is not None and plan.decoder.last
        if self.last:
            self.output = placement.column_parallel_linear(output_spec(config))
        if placement.resolved_device.type != "meta":
            self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Gives every parameter its initial value, and compute the rotary table."""
        initialize_parameters(self, seed=seed, mesh=self.mesh)
        if self.rotary is not None:
            self.rotary.reset()

    def stage_output_spec(
        self, stage: int, batch_size: int, source_length: int, target_length: int
    ) -> tuple["megatron_parallel.TensorSpec", ...]:
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
        parts = [sequence_shard_length(length, self.sequence_parallel_size) for length in lengths]
        return tuple(
            megatron_parallel.TensorSpec((part, batch_size, width), self.dtype) for part in parts
        )

    def forward(
        self,
        *inputs: Float[Tensor, "_ b h"],
        source: Int[Tensor, "b t"] | None = None,
        target: Int[Tensor, "b s"] | None = None,
        source_padding: Bool[Tensor, "b t"] | None = None,
        labels: Int[Tensor, "b s"] | None = None,
        dropout: Dropout | None = None,
        positions: Int[Tensor, "b s"] | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        logits_at: Int[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "..."] | tuple[Float[Tensor, "_ b h"], Float[Tensor, "_ b h"]]:
        """Runs this stage.

        All stages of a pipeline may be called with the same keyword arguments. With a cache the
        first pass has a source, whose keys and values for cross-attention the cache keeps. Later
        passes have none: the encoder rests, its stages are not called, and the decoder's stages
        pass on their stream alone. No sequence is then cut, as for `GPT.forward`.

        Args:
            *inputs: what the stage before returned: nothing on the first stage, the encoder's
                stream or output ``[t, b, h]``, or the decoder's stream ``[s, b, h]`` and the
                encoder's output; with sequence parallelism this rank's part of each.
            source: the encoder's tokens; the first stage reads them. With a cache every stage asks
                whether there are any.
            target: the decoder's tokens, for instance the labels one place later; the decoder's
                first stage reads them.
            source_padding: True where the encoder's text is padding, which nobody attends to; by
                default none is. Every stage reads it.
            labels: the token to predict at each place of the target; -100 marks a place without
                loss. Only the last stage reads them.
            dropout: what is dropped; nothing by default. Its key covers the longer of both texts.
            positions: of the target's tokens; by default those of the mask, and without any those
                after the cache's length.
            mask: which tokens of the target may attend to which, cached ones too; by default every
                token to itself and those before.
            cache: state of earlier tokens of the target; a `megatron_models.CrossKVCache`.
            logits_at: places among these tokens of the target for which logits are made, ``k`` of
                each sequence; by default all. Not with labels.

        Returns:
            The encoder's stream; the decoder's and the encoder's output, or with a cache and no
            source the decoder's alone; from the last stage the loss of each token, minus the
            log-probability of its label in nats, ``[b, s]``, or without labels logits ``[s, b,
            padded vocabulary / tp]``, ``[k, b, ...]`` with ``logits_at``, padding tokens at -inf.

        Raises:
            ConfigError: another number of tensors than the stage before passes on; tokens missing;
                texts of unequally many sequences; more tokens than the model has positions, or the
                key of dropout covers; a length that sequence parallelism cannot cut; labels with
                ``logits_at``, dropout with a cache.
        """
        decoding = cache is not None
        later = decoding and source is None  # the cache has what the encoder made
        self._check_inputs(inputs, later)
        encoder, decoder = self.encoder, self.decoder
        encoded = None if later else inputs[-1] if inputs else None
        if encoder is not None and not later:
            x = inputs[0] if encoder.embedding is None else self._tokens("source", source)
            text = Mask(causal=False, document_ids=documents(source_padding))
            encoded = encoder(x, self._context(x, text, dropout, whole=decoding))
        if decoder is None:
            return self._made(encoded)
        x = inputs[0] if decoder.embedding is None else self._tokens("target", target)
        mask = Mask() if mask is None else mask
        if positions is None:
            positions = self._positions(x, mask, cache)
        context = self._context(x, mask, dropout, positions, cache, whole=decoding)
        made = None if encoded is None else (encoded.shape[1], self._length(encoded, decoding))
        new = (x.shape[1 if x.is_floating_point() else 0], self._length(x, decoding))
        cross_mask = mask_of_source(source_padding, made, new, x.device)
        x = decoder(x, replace(context, encoder_output=encoded, cross_mask=cross_mask), positions)
        if self.output is None:
            return x if encoded is None else (x, encoded)
        return self._end(self.output, x, labels, logits_at, whole=decoding)

    def first_active_stage(self, decoding_pass: DecodingPass) -> int:
        """Returns 0 where there is a source to encode, else the first stage of the decoder."""
        pipeline = self.mesh.layout.pp * self.mesh.layout.vpp > 1
        return self.encoder_stages if decoding_pass.source is None and pipeline else 0

    def input_shapes(self, decoding_pass: DecodingPass) -> tuple[tuple[int, ...], ...]:
        """Returns the uncut shapes of `stage_output_spec`, or of the decoder's stream alone."""
        (batch, length), width = decoding_pass.tokens.shape, self.config.hidden_size
        if self.stage == self.first_active_stage(decoding_pass):
            return ()
        target = [(length, batch, width)] if self.stage > self.encoder_stages else []
        source = (
            [] if decoding_pass.source is None else [(decoding_pass.source.shape[1], batch, width)]
        )
        return (*target, *source)

    def decode(
        self, inputs: tuple[Float[Tensor, "..."], ...], decoding_pass: DecodingPass
    ) -> tuple[Float[Tensor, "..."], ...]:
        """Runs this stage on a source and new tokens, or on new tokens."""
        outcome = self(
            *inputs,
            source=decoding_pass.source,
            target=decoding_pass.tokens,
            source_padding=decoding_pass.source_padding,
            positions=decoding_pass.positions,
            mask=decoding_pass.mask,
            cache=decoding_pass.cache,
            logits_at=decoding_pass.logits_at,
        )
        return outcome if isinstance(outcome, tuple) else (outcome,)

    def _check_inputs(self, inputs: tuple[Tensor, ...], later: bool) -> None:
        """Refuses another number of tensors than the stage before passes on."""
        if later and self.decoder is None:
            raise ConfigError(
                f"stage {self.stage} has the encoder's layers only, and a pass without a source "
                "was given: it begins at the decoder's first stage"
            )
        behind = self.stage > self.encoder_stages
        wanted = int(behind) if later else min(self.stage, 1) + behind
        if len(inputs) != wanted:
            what = ("no tensor", "1 tensor of the encoder", "2 tensors, decoder's and encoder's")
            wants = "1 tensor of the decoder" if later and wanted else what[wanted]
            raise ConfigError(
                f"stage {self.stage}, with {self.encoder_stages} stages of the encoder, takes "
                f"{wants}, not {len(inputs)}"
            )

    def _made(self, encoded: Tensor | None) -> Tensor:
        """Returns what the encoder made, on a stage that has no more than that."""
        if encoded is None:
            raise ConfigError(f"stage {self.stage} has neither an encoder nor a decoder")
        return encoded

    def _end(
        self,
        output: ColumnParallelLinear,
        x: Float[Tensor, "part b h"],
        labels: Int[Tensor, "b s"] | None,
        logits_at: Int[Tensor, "b k"] | None,
        *,
        whole: bool,
    ) -> Float[Tensor, "..."]:
        """Losses or logits, of all places or of some; ``whole`` says that the stream is not cut."""
        cut, vocab = self.sequence_parallel_size > 1 and not whole, self.config.vocab_size
        if labels is not None:
            if logits_at is not None:
                raise ConfigError(
                    "labels and logits_at exclude each other: a loss needs all places"
                )
            loss = self.vocabulary_loss
            return token_losses(output, x, labels, vocab, loss, sequence_parallel=cut)
        if logits_at is None:
            return mask_padding_logits(output(x, sequence_parallel=cut), self.tp, vocab)
        x = select_tokens(x, logits_at, self.tp if cut else None)
        logits = output(x, sequence_parallel=cut)[: logits_at.shape[1]]
        return mask_padding_logits(logits, self.tp, vocab)

    def _tokens(self, name: str, tokens: Tensor | None) -> Tensor:
        """Returns the tokens that this stage embeds."""
        if tokens is None:
            raise ConfigError(f"stage {self.stage} embeds {name} tokens: give `{name}` [b, s]")
        return tokens

    def _length(self, x: Tensor, whole: bool) -> int:
        """Tokens of a whole text, from tokens ``[b, s]`` or a stream ``[part, b, h]``."""
        if not x.is_floating_point():
            return x.shape[1]
        return x.shape[0] * (1 if whole else self.sequence_parallel_size)

    def _positions(self, x: Tensor, mask: Mask, cache: KVCache | None) -> Tensor | None:
        """Positions of the target's new tokens, if the mask says them."""
        if mask.query_positions is not None or mask.positions is None:
            return mask.query_positions
        start = 0 if cache is None else cache.length
        return mask.positions[:, start : start + self._length(x, cache is not None)]

    def _context(
        self,
        x: Tensor,
        mask: Mask,
        dropout: Dropout | None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        whole: bool,
    ) -> Context:
        """Returns what the layers of a half share, but for what the encoder made."""
        length = self._length(x, whole)
        sequence_shard_length(length, 1 if whole else self.sequence_parallel_size)
        offset = 0 if cache is None else cache.length
        end = offset + length
        self.config.check_sequence_length(end)
        if whole and dropout is not None:
            raise ConfigError("dropout was given together with a cache; decoding drops nothing")
        return Context(
            mask.prepare(length, end, offset, device=x.device),
            None if self.rotary is None else self.rotary(length, offset, positions),
            cache,
            offset,
            self._dropout(dropout, length),
            recompute=RecomputeConfig() if whole else self.recompute,
            sequence_parallel=False if whole else None,
        )

    def _dropout(self, dropout: Dropout | None, length: int) -> StageDropout | None:
        """Dropout of one of the texts, whose places are the first of the key."""
        if dropout is None:
            return None
        covered = dropout.key.word0.shape[0]
        if covered < length:
            raise ConfigError(
                f"the key of dropout covers {covered} positions of a text of {length}: make it for "
                "the longer of source and target"
            )
        own = replace(dropout, key=dropout.key.narrow(0, length))
        return StageDropout.from_dropout(own, self.tp if self.sequence_parallel else None)


def encoder_decoder_chunks(
    config: EncoderDecoderConfig,
    placement: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    seed: int = 1234,
) -> list[EncoderDecoder]:
    """Builds all stages of this rank, one `EncoderDecoder` for each of its ``vpp`` chunks.

    Raises:
        ConfigError: a ``split``, as each half is cut evenly over its stages; or as for the class.
    """
    if split is not None:
        raise ConfigError("an encoder-decoder cuts each half evenly over its stages: give no split")
    placement = Placement.resolve(placement)
    numbers = range(placement.mesh.layout.vpp)
    return [EncoderDecoder(config, placement, chunk=chunk, seed=seed) for chunk in numbers]
