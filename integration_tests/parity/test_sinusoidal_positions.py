"""Sinusoidal positions equal those of transformers."""

import pytest
import torch

pytest.importorskip("transformers")

from megatron_models.components.embedding.module import sinusoids
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings


def test_positions_equal_those_of_distilbert() -> None:
    expected = torch.empty(40, 24)
    create_sinusoidal_embeddings(n_pos=40, dim=24, out=expected)
    found = sinusoids(torch.arange(40)[None], 24)
    torch.testing.assert_close(found[:, 0].float(), expected, rtol=0, atol=1e-6)
