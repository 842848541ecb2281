"""A T5 generates the tokens of transformers' `generate`, on one rank, tp2 and pp2, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families.theirs import randomize, write
from megatron_infer import SamplingParams, generate_tokens, load_model
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool

transformers = pytest.importorskip("transformers")

NEW, START = 12, 0
SOURCES = [[9, 4, 33, 2, 7], [5], [50, 51, 3, 4, 5, 6, 7, 8, 20], [12, 60]]


def their_model(**changes: Any) -> Any:
    """Returns a random model whose tokens depend on the source, and which never ends a text."""
    torch.manual_seed(7)
    settings = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": START,
        "pad_token_id": START,
        "eos_token_id": None,
    }
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings | changes))
    randomize(model, 3)
    return model.double().eval()


@torch.no_grad()
def greedy(model: Any) -> list[tuple[int, ...]]:
    """Returns the greedy tokens of all sources in one batch."""
    width = max(map(len, SOURCES))
    padded = torch.tensor([[*one, *[START] * (width - len(one))] for one in SOURCES])
    seen = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in SOURCES])
    found = model.generate(
        padded, attention_mask=seen, max_new_tokens=NEW, num_beams=1, do_sample=False
    )
    return [tuple(row) for row in found[:, 1:].tolist()]


@pytest.mark.parametrize(
    "changes", [{}, {"feed_forward_proj": "relu", "tie_word_embeddings": False}], ids=["t5", "v1.1"]
)
def test_greedy_tokens_equal_those_of_transformers(
    worker_pool: WorkerPool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = their_model(**changes)
    expected = greedy(model)
    assert len(set(expected)) == len(SOURCES) and len({t for row in expected for t in row}) > 4
    folder = write(model, tmp_path / "theirs")
    settings = SamplingParams(max_new_tokens=NEW, temperature=0.0)

    def written(mesh: Mesh) -> list[tuple[int, ...]]:
        loaded = load_model(folder, mesh=mesh, tokenizer=None, dtype=torch.float64)
        assert loaded.start_token == START
        starts = [[START]] * len(SOURCES)
        found = generate_tokens(loaded.stages, starts, settings, sources=SOURCES)
        return [one.tokens for one in found]

    layouts = (ParallelLayout(tp=2, dp=1), ParallelLayout(pp=2, dp=1))
    ranks = [found for layout in layouts for found in worker_pool.run_mesh(layout, written)]
    for found in (written(Mesh.single()), *ranks):
        assert found == expected
