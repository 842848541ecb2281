"""An encoder and a decoder with cross-attention, whole or as one pipeline stage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import megatron_parallel
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import Mesh, RecomputeConfig, initialize_parameters
from megatron_parallel.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from megatron_models.cache import KVCache
from megatron_models.components.context import Context
from megatron_models.components.dropout import Dropout, StageDropout
from megatron_models.components.embedding.module import Embedding
from megatron_models.components.embedding.output import (
    Output,
    check_labels,
    output_logits,
    token_losses,
)
from megatron_models.components.embedding.spec import output_spec
from megatron_models.components.rotary.module import RotaryTables
from megatron_models.components.trunk import Trunk
from megatron_models.errors import ConfigError
from megatron_models.models.decoding import DecodingModel, DecodingPass
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig
from megatron_models.models.encoder_decoder.masks import documents, mask_of_source
from megatron_models.models.encoder_decoder.sharing import SharedParameters, share_between_chunks
from megatron_models.placement import Placement
from megatron_models.stages import StagePlan, plan_encoder_decoder_stage, sequence_shard_length


class EncoderDecoder(DecodingModel):
    """An encoder and a decoder, cut over the tensor-parallel and pipeline axes of a mesh.

    On a mesh with ``pp=1`` it is the whole model. Otherwise it is one stage; the encoder's stages
    come first (Megatron's order). A stage of the encoder outputs its stream. The first stage of the
    decoder embeds the decoder's tokens. Stages of the decoder output two tensors, their stream and
    the encoder's output, so the gradient of the latter accumulates the parts of all decoder layers.
    All stages have the parameter names of the whole model. Several stages may hold one parameter:
    the embedding that both sides and a tied output layer share, and each side's biases by relative
    position. Axes of their pipeline ranks are added to the mesh, so all its ranks build the model.

    The encoder attends in both directions. Tokens of the decoder attend to themselves, to earlier
    tokens, and to the encoder's whole text (Vaswani et al. 2017, with pre-LN).

    Initial weights depend on the seed and each parameter's global name, not on the layout. On the
    meta device the model has no values; call `initialize` after moving it with ``to_empty``.

    Args:
        config: The model's configuration.
        placement: Mesh, dtype, device and options. A mesh alone is short for `Placement(mesh)`.
        chunk: Index of the model chunk among this rank's ``vpp``, in the order of
            ``mesh.layout.stages``.
        encoder_stages: Number of stages of the encoder. Defaults to half of them. The layers of
            each side are divided evenly over its stages.
        split: Layers of every stage instead, numbered over both sides: those of the decoder follow
            those of the encoder.
        seed: Seed of the initial weights.

    Attributes:
        stage: Index of this stage in the pipeline; 0 for a whole model.
        last: Whether it returns logits and losses.
        embedding: The embedding that both sides share, on stages that need it; else None.
        encoder: This stage's part of the encoder; None on a stage of the decoder.
        decoder: This stage's part of the decoder; None on a stage of the encoder.

    Raises:
        LayoutError: Query groups, feed-forward width or heads do not divide over the tensor axis,
            or the layout does not support the recomputation.
        ConfigError: The chunk does not exist, a side has no stage, its layers do not divide over
            its stages, or the layout has context parallelism.
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
        split: Sequence[range] | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        placement = Placement.resolve(placement)
        mesh, layout = placement.mesh, placement.mesh.layout
        if layout.cp > 1:
            raise ConfigError(
                f"an encoder-decoder does not support context parallelism: cp={layout.cp}"
            )
        self.recompute, self.vocabulary_loss = placement.recompute, placement.bound_vocabulary_loss
        self.recompute.check(layout, sequence_parallel=placement.sequence_parallel)
        self.config, self.mesh, self.dtype = config, mesh, placement.dtype
        self.sequence_parallel, self.sequence_parallel_size = (
            placement.sequence_parallel,
            placement.sequence_parallel_size,
        )
        self.tp = mesh.axis("tp")
        depths = config.encoder_num_layers, config.num_layers
        plan = plan_encoder_decoder_stage(
            *depths, layout, mesh.axis("pp").index, chunk, encoder_stages, split
        )
        self.stage, self.encoder_stages = plan.stage, plan.encoder_stages
        trunks = config.trunks()
        rotations = dict.fromkeys(each for trunk in trunks.values() for each in trunk.rotations())
        self.rotary = RotaryTables(tuple(rotations), config.max_position_embeddings, placement)

        shared = SharedParameters.on(config, plan, mesh)
        embedding = shared.embedding(config, plan)
        self.embedding = None if embedding is None else Embedding(embedding, placement)

        def side(name: str, own: StagePlan | None) -> Trunk | None:
            if own is None:
                return None
            return Trunk(shared.side(name, trunks[name], own), placement)

        self.encoder = side("encoder", plan.encoder)
        self.decoder = side("decoder", plan.decoder)
        self.output: ColumnParallelLinear | None = None
        self.last = plan.decoder is not None and plan.decoder.last
        self.embeds = {
            "encoder": plan.encoder is not None and plan.encoder.first,
            "decoder": plan.decoder is not None and plan.decoder.first,
        }
        if self.last and config.output() is not None:
            self.output = placement.column_parallel_linear(output_spec(config))
        self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Initializes every parameter, and computes the rotary tables."""
        initialize_parameters(self, seed=seed, mesh=self.mesh)
        self.rotary.reset()

    def units(self) -> list[nn.Module]:
        """Returns the modules that fully sharded training gathers one at a time."""
        sides = [side for side in (self.encoder, self.decoder) if side is not None]
        return [block for side in sides for block in side.layers.values()]

    def stage_output_spec(
        self, stage: int, batch_size: int, source_length: int, target_length: int
    ) -> tuple["megatron_parallel.TensorSpec", ...]:
        """Returns the outputs for one micro-batch of any stage that is not the last.

        Args:
            stage: Index of the stage in the pipeline.
            batch_size: Sequences of the micro-batch.
            source_length: Length of the encoder's text, in tokens.
            target_length: Length of the decoder's text, in tokens.

        Returns:
            Shape and dtype of the encoder's stream; or of the decoder's stream and the encoder's
            output.

        Raises:
            ConfigError: Sequence parallelism cannot cut one of the lengths.
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
        first pass has a source, and the cache stores its keys and values for cross-attention. Later
        passes have no source: the encoder's stages are not called, and the decoder's stages output
        their stream alone. With a cache no sequence is cut, as for `GPT.forward`.

        Args:
            *inputs: Outputs of the previous stage: nothing on the first stage, the encoder's stream
                or output ``[t, b, h]``, or the decoder's stream ``[s, b, h]`` and the encoder's
                output. With sequence parallelism this rank's part of each.
            source: Tokens of the encoder, which the first stage reads. With a cache, every stage
                checks whether there are any.
            target: Tokens of the decoder, for instance the labels shifted by one; the decoder's
                first stage reads them.
            source_padding: True for padding of the source, which no token attends to. Defaults to
                no padding. Every stage reads it.
            labels: Token to predict at each index of the target; -100 marks a token without loss.
                Only the last stage reads them.
            dropout: Dropout. Defaults to none. Its key covers the longer of both texts.
            positions: Positions of the target's tokens. Defaults to those of the mask, or without
                any to those after the cache's length.
            mask: Mask of the target, cached tokens included. Defaults to causal.
            cache: Keys and values of earlier tokens of the target, a
                `megatron_models.CrossKVCache`.
            logits_at: Indices among these tokens of the target whose logits are computed, ``k`` for
                each sequence. Defaults to all. Excludes labels.

        Returns:
            The encoder's stream; the decoder's stream and the encoder's output, or with a cache and
            no source the decoder's stream alone. From the last stage the loss of each token, minus
            the log-probability of its label in nats, ``[b, s]``; or without labels the logits ``[s,
            b, padded vocabulary / tp]``, or ``[k, b, ...]`` with ``logits_at``. Logits of padding
            are -inf.

        Raises:
            ConfigError: The number of inputs is wrong; tokens are missing; the texts have different
                numbers of sequences; there are more tokens than positions, or than the dropout key
                covers; sequence parallelism cannot cut a length; labels are combined with
                ``logits_at``, or dropout with a cache.
        """
        decoding = cache is not None
        later = decoding and source is None  # the cache holds the encoder's keys and values
        self._check_inputs(inputs, later)
        encoder, decoder = self.encoder, self.decoder
        encoded = None if later else inputs[-1] if inputs else None
        if encoder is not None and not later:
            x = self._tokens("source", source) if self.embeds["encoder"] else inputs[0]
            text = Mask(causal=False, document_ids=documents(source_padding))
            of_source = self._context(encoder, x, text, dropout, whole=decoding)
            encoded = encoder(x, of_source, embedding=self._embedding("encoder"))
        if decoder is None:
            return self._encoder_only(encoded)
        x = self._tokens("target", target) if self.embeds["decoder"] else inputs[0]
        mask = Mask() if mask is None else mask
        if positions is None:
            positions = self._positions(x, mask, cache)
        context = self._context(decoder, x, mask, dropout, positions, cache, whole=decoding)
        source_shape = (
            None if encoded is None else (encoded.shape[1], self._length(encoded, decoding))
        )
        target_shape = (x.shape[1 if x.is_floating_point() else 0], self._length(x, decoding))
        cross_mask = mask_of_source(source_padding, source_shape, target_shape, x.device)
        context = replace(context, encoder_output=encoded, cross_mask=cross_mask)
        x = decoder(x, context, positions, embedding=self._embedding("decoder"))
        if not self.last:
            return x if encoded is None else (x, encoded)
        return self._end(self._output(), x, labels, logits_at, whole=decoding)

    def first_active_stage(self, decoding_pass: DecodingPass) -> int:
        """Returns 0 with a source to encode, else the first stage of the decoder."""
        pipeline = self.mesh.layout.pp * self.mesh.layout.vpp > 1
        return self.encoder_stages if decoding_pass.source is None and pipeline else 0

    def input_shapes(self, decoding_pass: DecodingPass) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of `stage_output_spec`, uncut, or of the decoder's stream alone."""
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
        output = self(
            *inputs,
            source=decoding_pass.source,
            target=decoding_pass.tokens,
            source_padding=decoding_pass.source_padding,
            positions=decoding_pass.positions,
            mask=decoding_pass.mask,
            cache=decoding_pass.cache,
            logits_at=decoding_pass.logits_at,
        )
        return output if isinstance(output, tuple) else (output,)

    def _check_inputs(self, inputs: tuple[Tensor, ...], later: bool) -> None:
        """Refuses another number of tensors than the previous stage outputs."""
        if later and self.decoder is None:
            raise ConfigError(
                f"stage {self.stage} has encoder layers only, but the pass has no source and "
                "begins at the decoder's first stage"
            )
        later_decoder_stage = self.stage > self.encoder_stages
        expected = int(later_decoder_stage) if later else min(self.stage, 1) + later_decoder_stage
        if len(inputs) != expected:
            tensors = ("no tensor", "1 tensor of the encoder", "2 tensors, decoder's and encoder's")
            needed = "1 tensor of the decoder" if later and expected else tensors[expected]
            raise ConfigError(
                f"stage {self.stage}, with {self.encoder_stages} stages of the encoder, takes "
                f"{needed}, not {len(inputs)}"
            )

    def _encoder_only(self, encoded: Tensor | None) -> Tensor:
        """Returns the encoder's output, on a stage that has nothing else."""
        if encoded is None:
            raise ConfigError(f"stage {self.stage} has neither an encoder nor a decoder")
        return encoded

    def _end(
        self,
        output: Output,
        x: Float[Tensor, "part b h"],
        labels: Int[Tensor, "b s"] | None,
        logits_at: Int[Tensor, "b k"] | None,
        *,
        whole: bool,
    ) -> Float[Tensor, "..."]:
        """Returns losses or logits; ``whole`` means that the stream is not cut."""
        check_labels(labels, logits_at)
        is_cut, config = self.sequence_parallel_size > 1 and not whole, self.config
        if labels is not None:
            loss = self.vocabulary_loss
            return token_losses(output, x, labels, config, loss, sequence_parallel=is_cut)
        return output_logits(output, x, config, self.tp, logits_at, is_cut=is_cut)

    def _embedding(self, side: str) -> Embedding | None:
        """Returns the shared embedding if a side of this stage embeds tokens with it."""
        return self.embedding if self.embeds[side] else None

    def _output(self) -> Output:
        """Returns the output layer, or the token embeddings that it is tied to."""
        if self.output is not None:
            return self.output
        if self.embedding is None:
            raise ConfigError(f"stage {self.stage} is not the last and has no output layer")
        tied: Output = self.embedding.word.output
        return tied

    def _tokens(self, name: str, tokens: Tensor | None) -> Tensor:
        """Returns the tokens that this stage embeds."""
        if tokens is None:
            raise ConfigError(f"stage {self.stage} embeds {name} tokens; pass `{name}` [b, s]")
        return tokens

    def _length(self, x: Tensor, whole: bool) -> int:
        """Returns the length of a text from tokens ``[b, s]`` or a stream ``[part, b, h]``."""
        if not x.is_floating_point():
            return x.shape[1]
        return x.shape[0] * (1 if whole else self.sequence_parallel_size)

    def _positions(self, x: Tensor, mask: Mask, cache: KVCache | None) -> Tensor | None:
        """Returns the mask's positions of the target's new tokens, or None."""
        if mask.query_positions is not None or mask.positions is None:
            return mask.query_positions
        start = 0 if cache is None else cache.length
        return mask.positions[:, start : start + self._length(x, cache is not None)]

    def _context(
        self,
        trunk: Trunk,
        x: Tensor,
        mask: Mask,
        dropout: Dropout | None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        whole: bool,
    ) -> Context:
        """Returns the state that one side's layers share, without the encoder's output."""
        length = self._length(x, whole)
        sequence_shard_length(length, 1 if whole else self.sequence_parallel_size)
        offset = 0 if cache is None else cache.length
        end = offset + length
        self.config.check_sequence_length(end)
        if whole and dropout is not None:
            raise ConfigError("dropout and cache exclude each other: decoding has no dropout")
        bias = None
        if trunk.relative_bias is not None:
            bias = trunk.relative_bias(mask, length, end, offset)
        return Context(
            mask.prepare(length, end, offset, device=x.device),
            self.rotary(length, offset, positions, None if whole else length),
            cache,
            offset,
            self._dropout(dropout, length),
            recompute=RecomputeConfig() if whole else self.recompute,
            sequence_parallel=False if whole else None,
            score_bias=bias,
        )

    def _dropout(self, dropout: Dropout | None, length: int) -> StageDropout | None:
        """Returns the dropout of one text, which uses the beginning of the key."""
        if dropout is None:
            return None
        covered = dropout.key.word0.shape[0]
        if covered < length:
            raise ConfigError(
                f"the dropout key covers {covered} of {length} positions of a text; make it for "
                "the longer of source and target"
            )
        own = replace(dropout, key=dropout.key.narrow(0, length))
        return StageDropout.from_dropout(own, self.tp if self.sequence_parallel else None)


def encoder_decoder_chunks(
    config: EncoderDecoderConfig,
    placement: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    encoder_stages: int | None = None,
    seed: int = 1234,
) -> list[EncoderDecoder]:
    """Builds this rank's stages, one `EncoderDecoder` for each of its ``vpp`` model chunks.

    Parameters that several stages of the rank hold are the same tensor. Arguments and errors are
    those of `EncoderDecoder`.
    """
    placement = Placement.resolve(placement)
    options: dict[str, Any] = {"split": split, "encoder_stages": encoder_stages, "seed": seed}
    numbers = range(placement.mesh.layout.vpp)
    chunks = [EncoderDecoder(config, placement, chunk=chunk, **options) for chunk in numbers]
    share_between_chunks(chunks)
    return chunks
