"""Settings of masked language modelling, shared by the tasks that hide words of sentences.

Importing this module does not import numpy.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_train.config.fields import check_positive, setting
from megatron_train.errors import TrainError

if TYPE_CHECKING:
    from megatron_data.datasets import MaskingConfig


@dataclass(frozen=True)
class MaskingSettings:
    """The section ``masking``: how many words of a sample are hidden, and which.

    Names and defaults are Megatron-LM's, which has flags for the first two settings only.

    Raises:
        TrainError: A value is out of range, or two settings exclude each other.
    """

    mask_prob: float = setting(0.15, "fraction of the tokens of a sample that are masked")
    short_seq_prob: float = setting(
        0.1, "fraction of samples that are shorter than --seq-length, of random length"
    )
    mask_max_ngram: int = setting(
        3, "largest number of consecutive words that are masked together (our name)", unit="words"
    )
    mask_whole_words: bool = setting(
        True, "mask whole words; otherwise single pieces of words (our name)"
    )
    mask_longer_ngrams: bool = setting(
        False, "draw long runs of masked words more often than short ones (our name)"
    )
    mask_geometric: bool = setting(
        False,
        "draw the number of words that are masked together from SpanBERT's geometric distribution "
        "(our name)",
    )
    mask_permutation: bool = setting(
        False, "also permute as many other tokens and predict the original ones (our name)"
    )

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise TrainError(f"--mask-prob must be between 0 and 1, got {self.mask_prob}")
        if not 0 <= self.short_seq_prob <= 1:
            raise TrainError(f"--short-seq-prob must be in [0, 1], got {self.short_seq_prob}")
        check_positive(self, "mask_max_ngram")
        if self.mask_geometric and self.mask_permutation:
            raise TrainError("--mask-geometric and --mask-permutation exclude each other; give one")

    def masking(self) -> "MaskingConfig":
        """Returns the settings of masking as megatron-data takes them."""
        from megatron_data.datasets import MaskingConfig

        return MaskingConfig(
            probability=self.mask_prob,
            max_ngram=self.mask_max_ngram,
            whole_words=self.mask_whole_words,
            longer_ngrams=self.mask_longer_ngrams,
            geometric=self.mask_geometric,
            permutation=self.mask_permutation,
        )
