"""Sparse latent attention as plain data. Importing this module does not import torch."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from megatron_parallel import ParallelLayout, Sharding
from megatron_parallel.sharding import Init

from megatron_models.components.attention.qk_norm_spec import QKNormSpec
from megatron_models.components.attention.span import Span
from megatron_models.components.latent_attention.spec import LatentAttentionSpec
from megatron_models.components.mixer import (
    BytesByPart,
    Feature,
    KVSpec,
    LayerPass,
    Parameters,
    ParameterSpec,
    UnsupportedFeature,
    prefixed,
)
from megatron_models.components.sparse_attention.config import SparseAttentionConfig
from megatron_models.errors import ConfigError

INDEXER_LOSS: Final = "indexer_loss"
_EPSILON: Final = 1e-6
_ONE_RANK: Final = "selects keys of whole documents; leave one of them out"


@dataclass(frozen=True, kw_only=True)
class SparseAttentionSpec(SparseAttentionConfig, LatentAttentionSpec):
    """Latent attention whose queries read the keys that an indexer selects.

    The indexer has queries from the latent of queries, one normed key for each token, and a weight
    of each head. The score of a key is the sum over heads of ``weight * relu(query key)``. Every
    tensor-parallel rank holds the indexer. Its gradients come from its loss alone, of which each
    rank has an equal share, so they are partial sums.
    """

    module: ClassVar[str] = "megatron_models.components.sparse_attention.module:SparseAttention"

    def _check(self) -> None:
        super()._check()
        if not self.multi_latent_attention:
            raise ConfigError(
                "sparse attention (dsa) needs {multi_latent_attention:name}; set it",
                vars(self),
            )
        rotated = self.qk_pos_emb_head_dim
        if self.dsa_indexer_head_dim < rotated:
            raise ConfigError(
                "{dsa_indexer_head_dim} is less than {qk_pos_emb_head_dim}, the channels that are "
                f"rotated; use {{dsa_indexer_head_dim:name}} {rotated} or more",
                vars(self),
            )

    def indexer(self) -> dict[str, Sharding]:
        """Returns the shardings of the projections to queries, keys and weights of heads."""
        heads, width = self.dsa_indexer_n_heads, self.dsa_indexer_head_dim
        init, inputs = Init(scale=self.init_method_std), self.q_lora_rank or self.hidden_size
        shapes = {
            "q": (heads, width, inputs),
            "k": (width, self.hidden_size),
            "weights": (heads, self.hidden_size),
        }
        return {name: Sharding(shape, init=init, partial="tp") for name, shape in shapes.items()}

    @property
    def index_norm(self) -> QKNormSpec:
        """The norm of the indexer's keys, LayerNorm in all models."""
        return self.component(
            QKNormSpec,
            hidden_size=self.dsa_indexer_head_dim,
            normalization="LayerNorm",
            norm_epsilon=_EPSILON,
            apply_layernorm_1p=False,
            norm_bias=True,
        )

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of latent attention, then those of the indexer."""
        own = {name: ParameterSpec(cut) for name, cut in self.indexer().items()}
        own = {name: replace(spec, multiply_adds=spec.numel) for name, spec in own.items()}
        own |= prefixed("k_norm", self.index_norm.parameters(sequence_parallel))
        return super().parameters(sequence_parallel) | prefixed("indexer", own)

    def cached(self, tp: int) -> KVSpec:
        """Returns latent and rotated key as for latent attention, and the key of the indexer."""
        own = super().cached(tp)
        return replace(own, key_channels=own.key_channels + self.dsa_indexer_head_dim)

    def multiply_adds_of_pairs(self, tokens: int, squared_lengths: int) -> int:
        """Returns those of attention to the selected keys, and of the indexer with all keys."""
        selected = Span(self.dsa_indexer_topk).pairs(tokens, squared_lengths)
        attended = super().multiply_adds_per_pair() * selected
        return (attended + self._index_pair * squared_lengths) // 2

    def multiply_adds_per_pair(self) -> int:
        """Returns those of attention and of the indexer, for a key that is selected."""
        return super().multiply_adds_per_pair() + self._index_pair

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns an estimate: latent attention, inputs of the indexer, and the selected keys."""
        wide, tokens = max(layer_pass.saved_bytes.activation, 4), layer_pass.tokens
        own = (self.dsa_indexer_n_heads + 1) * (self.dsa_indexer_head_dim + 1) * wide
        selected = tokens * layer_pass.sequence_length
        return {**super().activations(layer_pass), "indexer": tokens * own + selected}

    def auxiliary_losses(self) -> tuple[str, ...]:
        """Returns the loss of the indexer, if it is trained."""
        return (INDEXER_LOSS,) if self.dsa_indexer_loss_coeff else ()

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns that ranks cannot share documents."""
        if feature != "document_pool":
            return None
        return UnsupportedFeature("{dsa_indexer_topk:name}", _ONE_RANK)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses tensor-parallel sizes that do not divide the heads, and context parallelism.

        Raises:
            ConfigError: The layout cannot cut sparse attention.
        """
        super().check_layout(layout)
        if layout.cp > 1:
            raise ConfigError(
                "{cp} cannot cut sparse attention, whose indexer ranks the keys of a whole "
                "sequence; use {cp:name} 1",
                {**vars(self), "cp": layout.cp},
            )

    @property
    def _index_pair(self) -> int:
        """Multiply-adds of the indexer with one query-key pair."""
        return self.dsa_indexer_n_heads * (self.dsa_indexer_head_dim + 1)
