"""The configuration of sparse attention. Importing this module does not import torch."""

from dataclasses import dataclass, field

from megatron_models.components.fields import flag
from megatron_models.components.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig(StreamConfig):
    """The indexer of sparse attention (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).

    Names are those of Megatron-LM's flags, defaults those of DeepSeek-V3.2.
    """

    dsa_indexer_n_heads: int = field(
        default=64,
        metadata=flag(
            "--dsa-indexer-n-heads",
            "sparse attention: heads of the indexer",
            positive=True,
            small=2,
        ),
    )
    dsa_indexer_head_dim: int = field(
        default=128,
        metadata=flag(
            "--dsa-indexer-head-dim",
            "sparse attention: width of a head of the indexer; its first --qk-pos-emb-head-dim "
            "channels are rotated",
            positive=True,
            unit="channels",
            small=8,
        ),
    )
    dsa_indexer_topk: int = field(
        default=2048,
        metadata=flag(
            "--dsa-indexer-topk",
            "sparse attention: keys that each query attends to, those with the highest scores of "
            "the indexer",
            positive=True,
            unit="tokens",
            small=5,
        ),
    )
    dsa_indexer_loss_coeff: float = field(
        default=0.0,
        metadata=flag(
            "--dsa-indexer-loss-coeff",
            "sparse attention: weight of the indexer's loss, the KL divergence of its softmax from "
            "the mean probabilities of attention; 0: the indexer is not trained",
            nonnegative=True,
            objective=True,
        ),
    )
    dsa_indexer_use_sparse_loss: bool = field(
        default=False,
        metadata=flag(
            "--dsa-indexer-use-sparse-loss",
            "sparse attention: the indexer's loss compares the selected keys only",
            objective=True,
        ),
    )
