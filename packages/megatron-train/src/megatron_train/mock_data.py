"""Made-up samples, for trying a model or a layout without a corpus."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MockDataset:
    """Samples of tokens that count up, each from a number drawn for it.

    As in Megatron-LM's mock data there is something to learn, the next number; its documents and
    their order are not reproduced. A sample depends on the seed, the split and its own number.

    Attributes:
        samples: how many there are.
        sequence_length: tokens of a sample, ``s``.
        vocab_size: tokens are below it.
        seed: number that the first tokens are drawn from, with ``split``.
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
        """Returns tokens, labels, loss mask, positions and document numbers, all `[s]`."""
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
