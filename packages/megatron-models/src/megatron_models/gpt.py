"""GPT: a decoder-only transformer built from a configuration and a mesh."""

import torch
from jaxtyping import Float, Int
from megatron_kernels import Mask
from megatron_parallel import Init, Mesh, initialize_parameters
from megatron_parallel.tensor_parallel import (
    ColumnParallelLinear,
    column_parallel_linear,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn

from megatron_models.cache import KVCache
from megatron_models.config import GPTConfig
from megatron_models.layers.block import Block
from megatron_models.layers.embedding import Embedding
from megatron_models.layers.norm import Norm
from megatron_models.layers.rope import RotaryTable


class GPT(nn.Module):
    """A decoder-only transformer whose weights are cut over the tensor-parallel axis of a mesh.

    Initial weights depend on the seed and each parameter's global name, not on the layout. Built on
    the meta device the model has no values; call `initialize` after moving it with ``to_empty``.

    Args:
        config: the model's shape.
        mesh: where it lives and over which ranks it is cut.
        dtype: of the parameters; the loss is float32, or float64 for a float64 model.
        device: of the parameters; by default the mesh's device.
        seed: of the initial weights.

    Raises:
        LayoutError: query groups, feed-forward width or heads do not divide over the tensor axis.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        device = mesh.device if device is None else torch.device(device)
        self.embedding = Embedding(config, mesh, dtype, device)
        self.rotary: RotaryTable | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryTable(config, dtype, device)
        # Keyed by the global layer number, so that a pipeline stage's names are the whole model's.
        self.layers = nn.ModuleDict(
            {str(i): Block(config, mesh, i, dtype, device) for i in range(config.num_layers)}
        )
        self.final_norm = Norm(config, mesh, dtype, device)
        self.output: ColumnParallelLinear | None = None
        if config.untie_embeddings_and_output_weights:
            self.output = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                mesh,
                bias=False,
                padded=config.padded_vocab_size,
                init=Init(scale=config.init_method_std),
                dtype=dtype,
                device=device,
            )
        if device.type != "meta":
            self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Give every parameter its initial value, and compute the rotary table."""
        initialize_parameters(self, seed=seed, mesh=self.mesh)
        if self.rotary is not None:
            self.rotary.reset()

    def forward(
        self,
        tokens: Int[Tensor, "b s"],
        *,
        positions: Int[Tensor, "b s"] | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "s b v_part"]:
        """Return logits ``[s, b, padded vocabulary / tp]``; those of padding tokens are -inf.

        Args:
            tokens: token numbers.
            positions: position of each token, for its embedding or rotation; by default those of
                the mask, and without any the tokens' places, counted from the cache's length.
            mask: who may attend to whom; by default every token to itself and those before. With a
                cache it describes cached and new tokens together.
            cache: keys and values of earlier tokens, to which those of ``tokens`` are added.

        Raises:
            ConfigError: more tokens than the model has positions, or the cache room.
        """
        logits = self._logits(self._hidden(tokens, positions, mask, cache))
        true = self.config.vocab_size - self.mesh.axis("tp").index * logits.shape[-1]
        if true < logits.shape[-1]:
            logits[..., max(true, 0) :] = -torch.inf
        return logits

    def loss(
        self,
        tokens: Int[Tensor, "b s"],
        labels: Int[Tensor, "b s"],
        *,
        positions: Int[Tensor, "b s"] | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "b s"]:
        """Return the loss of each token: minus the log-probability of its label, in nats.

        Args:
            tokens: token numbers.
            labels: the token to predict at each place; -100 marks a place without loss.
            positions: as for `forward`.
            mask: as for `forward`.
        """
        logits = self._logits(self._hidden(tokens, positions, mask, None))
        axis, vocab = self.mesh.axis("tp"), self.config.vocab_size
        return vocab_parallel_cross_entropy(logits, labels.t(), axis, vocab).t()

    def _hidden(
        self,
        tokens: Int[Tensor, "b s"],
        positions: Int[Tensor, "b s"] | None,
        mask: Mask | None,
        cache: KVCache | None,
    ) -> Float[Tensor, "s b h"]:
        length = tokens.shape[1]
        offset = 0 if cache is None else cache.length
        end = offset + length
        self.config.check_sequence_length(end)
        if mask is None:
            mask = Mask()
        elif positions is None and mask.query_positions is not None:
            positions = mask.query_positions
        elif positions is None and mask.positions is not None:
            positions = mask.positions[:, offset:end]
        mask = mask.prepare(length, end, offset, device=tokens.device)
        x = self.embedding(tokens, positions, offset)
        angles = None if self.rotary is None else self.rotary(length, offset, positions)
        for block in self.layers.values():
            x = block(x, mask, angles, cache, offset)
        result: Tensor = self.final_norm(x)
        return result

    def _logits(self, x: Float[Tensor, "s b h"]) -> Float[Tensor, "s b v_part"]:
        if self.output is not None:
            logits: Tensor = self.output(x)
            return logits
        axis = self.mesh.axis("tp")
        return column_parallel_linear(x, self.embedding.word.weight, None, axis)
