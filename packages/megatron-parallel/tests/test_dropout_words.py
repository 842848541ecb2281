"""Masks of attention probabilities as words, for parts of a mask."""

import pytest
import torch
from megatron_parallel import DropoutKey, KeptWords
from megatron_parallel.dropout import keep_mask


@pytest.mark.parametrize("layer", [3, torch.tensor(3)], ids=["number", "tensor"])
def test_words_of_samples_and_heads_are_the_mask_of_probabilities(layer: int) -> None:
    """Probabilities `[b, n, s, t]`: each of 2 samples has a key, each of 3 heads has channels."""
    samples, channels = torch.tensor([4, 9]), torch.arange(21, dtype=torch.int32).view(1, 3, 7)
    key = DropoutKey.for_batch(seed=1234, iteration=7, samples=samples, positions=5)
    mask = keep_mask((5, 2, 3, 7), 0.4, key, layer=3, site=1).permute(1, 2, 0, 3).int()
    words = [word.t().contiguous()[:, None] for word in (key.word0, key.word1)]
    kept = KeptWords.of(channels, *words, 0.4, layer=layer, site=1)
    assert torch.equal(kept.part(slice(1, 4), slice(2, 7)), mask[:, :, 1:4, 2:7])
