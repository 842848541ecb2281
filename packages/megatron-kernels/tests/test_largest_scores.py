"""The largest score of each head against all scores, written out in float64."""

import math

import pytest
import torch
from megatron_kernels import Mask, largest_scores

MASKS = {
    "causal": Mask(),
    "every key": Mask(causal=False),
    "window": Mask(window=3),
    "documents": Mask(
        document_ids=torch.tensor(
            [[0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, -1, -1]], dtype=torch.int32
        )
    ),
    "positions": Mask(positions=torch.tensor([[6, 0, 5, 1, 4, 2, 3]] * 2, dtype=torch.int32)),
}


@pytest.mark.parametrize("elements", [1, 200, 2**24])
@pytest.mark.parametrize("name", MASKS)
def test_it_is_the_maximum_over_the_pairs_that_may_attend(name, elements, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(7, 2, 4, 8, dtype=torch.float64, generator=generator)
    k = torch.randn(7, 2, 2, 8, dtype=torch.float64, generator=generator)
    wanted = []
    allowed = MASKS[name].allowed(7, 7).expand(2, 7, 7)
    for head in range(4):
        scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, head // 2]) / math.sqrt(8)
        wanted.append(scores[allowed].max())
    sizes, true = [], torch.einsum

    def product(*given):
        found = true(*given)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(torch, "einsum", product)
    found = largest_scores(q, k, MASKS[name], elements=elements)
    one_query = 2 * 4 * 7
    assert max(sizes) <= max(elements, one_query)  # in memory at once
    assert len(sizes) == {1: 7, 200: 3, 2**24: 1}[elements]
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-12, atol=0)
    scaled = largest_scores(q, k, MASKS[name], 0.5, elements=elements)
    torch.testing.assert_close(scaled, 0.5 * math.sqrt(8) * found, rtol=1e-12, atol=0)


def test_a_head_without_pairs_has_none_and_low_precision_is_widened():
    padding = Mask(document_ids=torch.full((1, 3), -1, dtype=torch.int32))
    q, k = torch.ones(3, 1, 2, 4).bfloat16(), torch.ones(3, 1, 1, 4).bfloat16()
    assert largest_scores(q, k, padding).tolist() == [-math.inf, -math.inf]
    for given in ((q[:0], k), (q, k[:0]), (q[:, :0], k[:, :0])):
        assert largest_scores(*given, Mask()).tolist() == [-math.inf, -math.inf]
    found = largest_scores(q, k, Mask())
    assert found.dtype == torch.float32
    assert found.tolist() == [2.0, 2.0]
    assert not largest_scores(q.requires_grad_(), k, Mask()).requires_grad
