"""Norms of queries and keys as plain data. Importing this module does not import torch."""

from dataclasses import dataclass, replace

from megatron_parallel import Sharding

from megatron_models.components.norm.spec import NormSpec
from megatron_models.components.saved_bytes import SavedBytes


@dataclass(frozen=True, kw_only=True)
class QKNormSpec(NormSpec):
    """The norm of the queries or of the keys of a layer.

    Every rank holds the whole gain, and normalizes its own heads only.

    Attributes:
        whole: Whether the channels of all heads are normalized together, so that the gain is that
            of all heads. Otherwise each head is, and all heads share a gain.
    """

    whole: bool = False

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the shardings of gain and bias.

        Their gradients are always partial sums, over the heads of the tensor-parallel ranks.
        """
        cuts = super().shardings(sequence_parallel)
        return {name: replace(sharding, partial="tp") for name, sharding in cuts.items()}

    def copies_input(self, saved_bytes: SavedBytes) -> bool:
        """Returns whether a copy of the input is saved in a higher precision."""
        if self.whole:
            return False
        narrow = saved_bytes.activation < 4
        return saved_bytes.norm_input > saved_bytes.activation or (
            self.apply_layernorm_1p and narrow
        )

    def saved_of_heads(
        self, tokens: int, channels: int, saved_bytes: SavedBytes, *, shares_input: bool
    ) -> int:
        """Returns the bytes that one rank saves.

        Args:
            tokens: Number of tokens.
            channels: Channels of the rank's heads together.
            saved_bytes: Bytes that operations save.
            shares_input: Whether the input is a view of a tensor that is saved anyway.
        """
        if not self.whole:
            return self.saved(tokens * channels // self.hidden_size, saved_bytes, shares_input)
        statistic = max(saved_bytes.activation, 4)
        of_input = 0 if shares_input else channels * saved_bytes.activation
        return tokens * (of_input + statistic)
