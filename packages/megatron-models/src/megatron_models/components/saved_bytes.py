"""Bytes that operations save for the backward pass.

Importing this module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from megatron_models.fused_operations import fused_on_cuda

_LONGEST_MASK: Final = 512
"""Longest sequence of which attention of megatron-kernels saves a dropout mask on a CPU."""


@dataclass(frozen=True)
class LinearInput:
    """Bytes of an element of an input that a linear layer converts and saves.

    Attributes:
        each: Bytes of an element, with its share of scales.
        gathered: The same of an input that is cut along the sequence and gathered. None if it is
            saved as it is.
    """

    each: float
    gathered: float | None = None


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that operations save for the backward pass, for each element of what they save.

    Attributes:
        activation: Bytes of an element of an activation.
        dropout_mask: Bytes of an element of a dropout mask; 0 for a mask that is recomputed from
            a hash.
        per_score: Bytes for each query, key and head: scores, probabilities, and the output of
            attention dropout. 0 for fused attention.
        dropped_scores: Bytes for each query, key and head of the output of attention dropout, which
            only unfused attention saves.
        attention_mask: Bytes for each query and key, shared by all heads and samples: whether the
            query may attend to the key. With documents there is a mask for each sample, which is
            not counted here.
        window_mask: Bytes for each query and key that fused attention saves in a layer with a
            window: the mask as a summand, in the precision of the activations. 0 if its kernel
            computes the window.
        mask_bits: Whether fused attention of short sequences saves the mask of its dropout, a bit
            for each probability.
        logsumexp: Bytes for each query and head: the log-sum-exp of the scores.
        qkv_copy: Bytes of an element of the copies of queries, keys and values that attention saves
            in a higher precision. 0 if it saves the originals.
        norm_statistic: Bytes of a statistic that a norm saves for each token.
        normalized_input: Bytes of an element of the normalized input, if a norm saves it too.
        norm_input: Bytes of an element of a norm's input, if it is saved in another precision.
        copies_for_gain: Whether a norm of 16-bit input whose gain is `1 + weight` saves input, gain
            and shift in float32.
        pads_values: Whether fused attention pads values that are narrower than keys to their width,
            and saves its padded output too.
        packs_rope: Whether one kernel rotates and separates queries, keys and values. Otherwise
            values are a view of the projection, which stays in memory beside rotated copies.
        fused_scores: Whether fused attention has soft-cap, sinks and slopes too.
        logit: Bytes of an element of what the loss saves of all logits: probabilities in float32,
            or the logits. 0 for the former.
        linear_input: How linear layers save inputs that no other operation saves. None as they are.
    """

    activation: int
    dropout_mask: int = 0
    per_score: int = 0
    dropped_scores: int = 0
    attention_mask: int = 0
    window_mask: int = 0
    mask_bits: bool = False
    logsumexp: int = 4
    qkv_copy: int = 0
    norm_statistic: int = 4
    normalized_input: int = 0
    norm_input: int = 0
    copies_for_gain: bool = True
    pads_values: bool = False
    packs_rope: bool = False
    fused_scores: bool = False
    logit: int = 0
    linear_input: LinearInput | None = None

    def of_linear(self, elements: int, *, gathered: bool = False) -> int:
        """Returns the bytes that a linear layer saves of its input.

        Args:
            elements: Elements of the input on this rank.
            gathered: Whether other ranks have the rest of it along the sequence.
        """
        saved = self.linear_input
        each = None if saved is None else saved.gathered if gathered else saved.each
        return round(elements * (self.activation if each is None else each))

    @classmethod
    def paper(cls) -> "SavedBytes":
        """Returns the assumptions of Korthikanti et al. 2022.

        Activations are bfloat16. Each score takes 2 + 1 + 2 bytes: the probability, its dropout
        mask and the output of dropout.
        """
        return cls(activation=2, dropout_mask=1, per_score=5, logsumexp=0, norm_statistic=0)

    @classmethod
    def cpu(
        cls,
        activation: int,
        normalization: str,
        *,
        attention_dropout: bool = False,
    ) -> "SavedBytes":
        """Returns what this package's operations save on a CPU.

        Attention with dropout is computed in tiles, which save neither scores nor the log-sum-exp
        nor padded values, and the mask of short sequences alone. Unfused attention saves the output
        of dropout too. RMSNorm is not fused and computes in at least float32.

        Args:
            activation: Bytes of an element of an activation.
            normalization: ``LayerNorm`` or ``RMSNorm``.
            attention_dropout: Whether there is dropout on attention probabilities.
        """
        wide = max(activation, 4)
        rms = normalization == "RMSNorm"
        return cls(
            activation=activation,
            dropped_scores=wide if attention_dropout else 0,
            window_mask=0 if attention_dropout else activation,
            mask_bits=attention_dropout,
            logsumexp=0 if attention_dropout else wide,
            norm_statistic=wide,
            copies_for_gain=rms,
            normalized_input=wide if rms else 0,
            norm_input=wide if rms else 0,
            pads_values=not attention_dropout,
        )

    def dropout_mask_of_head(self, length: int) -> int:
        """Returns the bytes that fused attention saves of the dropout mask of a head of a sample.

        Args:
            length: Number of queries and of keys.
        """
        if not self.mask_bits or length > _LONGEST_MASK:
            return 0
        return 4 * -(-length // 32) * length

    @classmethod
    def of_backends(
        cls, activation: int, backends: Mapping[str, str], *, attention_dropout: bool = False
    ) -> "SavedBytes":
        """Returns what operations save on a CUDA device.

        Norms, activations and dropout save the same with all backends but the references.

        Args:
            activation: Bytes of an element of an activation.
            backends: Chosen backends by operation, as in `megatron_models.Placement`.
            attention_dropout: Whether there is dropout on attention probabilities.
        """
        packed = backends.get("rope_qkv", "triton") == "triton"
        found = cls(
            activation=activation,
            packs_rope=packed and fused_on_cuda("rope_qkv", backends),
            logit=activation if fused_on_cuda("vocab_cross_entropy", backends) else 0,
            dropped_scores=max(activation, 4) if attention_dropout else 0,
        )
        chosen = backends.get("attention", "auto")
        found = replace(found, fused_scores=bool({"auto", "triton"} & {*chosen.split(",")}))
        return found.with_unfused_attention() if chosen == "reference" else found

    def with_unfused_attention(self, extra: int = 0) -> "SavedBytes":
        """Returns the same operations with unfused attention.

        Unfused attention computes in at least float32. It saves scores and probabilities, for each
        row the log-sum-exp and whether it is finite, and in each layer the mask.

        Args:
            extra: Bytes for each query, key and head beside scores and probabilities.
        """
        wide = max(self.activation, 4)
        if self.per_score:
            return replace(self, per_score=self.per_score + extra)
        qkv_copy = wide if self.activation < wide else 0
        per_score = 2 * wide + self.dropped_scores + extra
        return replace(
            self,
            per_score=per_score,
            attention_mask=1,
            mask_bits=False,
            logsumexp=wide + 1,
            qkv_copy=qkv_copy,
        )
