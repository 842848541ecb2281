"""Synthetic samples to try a model or a layout without a corpus."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MockDataset:
    """Samples of tokens that count up from a random first token.

    A model can learn the next token, as with Megatron-LM's mock data, whose documents and order are
    not reproduced. A sample depends on the seed, the split and the number of the sample.

    Attributes:
        samples: Number of samples.
        sequence_length: Tokens in a sample, ``s``.
        vocab_size: Size of the vocabulary.
        seed: Seed of the first tokens, together with ``split``.
        split: 0 for training, 1 for validation, 2 for testing.
    """

    samples: int
    sequence_length: int
    vocab_size: int
    seed: int
    split: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int, /) -> dict[str, NDArray[Any]]:
        """Returns tokens, labels, loss mask, positions and document ids, all `[s]`."""
        drawn = np.random.default_rng((self.seed, self.split, sample))
        count = np.arange(self.sequence_length + 1, dtype=np.int64)
        text = (drawn.integers(self.vocab_size) + count) % self.vocab_size
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": np.ones(self.sequence_length, dtype=np.float32),
            "positions": count[:-1].astype(np.int32),
            "document_ids": np.zeros(self.sequence_length, dtype=np.int32),
            "sample_ids": np.asarray(sample, dtype=np.int64),
        }
