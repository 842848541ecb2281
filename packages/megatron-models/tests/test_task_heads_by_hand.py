"""Heads of sequences by hand: weights of tokens, dropout, and the head of each task."""

from typing import Any

import pytest
import torch
from megatron_models import (
    GPT,
    BertConfig,
    ConfigError,
    Dropout,
    GPTConfig,
    Placement,
    sentence_embeddings,
)
from megatron_models.components import dropout_sites
from megatron_models.components.heads.module import pooling_weights
from megatron_parallel import DropoutKey, Mesh
from megatron_parallel.dropout import keep_mask

SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}
IDS = torch.tensor([[0, 0, 0, 0], [3, 3, -1, -1], [-1, -1, -1, -1]])


@pytest.mark.parametrize(
    ("pooling", "ids", "weights"),
    [
        ("first", None, [[1, 0, 0, 0]]),
        ("last", None, [[0, 0, 0, 1]]),
        ("mean", None, [[0.25] * 4]),
        ("first", IDS, [[1, 0, 0, 0]]),
        ("last", IDS, [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]),
        ("mean", IDS, [[0.25] * 4, [0.5, 0.5, 0, 0], [0] * 4]),
        ("mean", IDS[1:2, :1], [[1.0]]),
    ],
)
def test_tokens_have_the_weights_of_their_pooling(pooling, ids, weights):
    length = len(weights[0])
    found = pooling_weights(pooling, torch.arange(length)[None], length, ids)
    assert found.dtype == torch.float64 and found.t().tolist() == weights


def test_parts_of_a_sequence_have_their_weights_of_the_whole():
    """A rank holds tokens 3 and 0 of each sequence."""
    part = torch.tensor([[3, 0]])
    assert pooling_weights("mean", part, 4, IDS).t().tolist() == [[0.25, 0.25], [0, 0.5], [0, 0]]
    assert pooling_weights("last", part, 4, IDS).t().tolist() == [[1, 0], [0, 0], [0, 0]]
    assert pooling_weights("last", part, 4, None).t().tolist() == [[1, 0]]
    assert pooling_weights("mean", part, 4, None).t().tolist() == [[0.25, 0.25]]


def test_embeddings_of_sentences_are_normed_means():
    stream = torch.tensor([[[3.0, 0.0], [6.0, 8.0]], [[3.0, 8.0], [9.0, 9.0]]])
    ids = torch.tensor([[0, 0], [0, -1]])
    assert sentence_embeddings(stream, ids, normalize=False).tolist() == [[3.0, 4.0], [6.0, 8.0]]
    assert sentence_embeddings(stream, ids).flatten().tolist() == pytest.approx([0.6, 0.8] * 2)
    last = sentence_embeddings(stream, ids, pooling="last", normalize=False)
    assert last.tolist() == [[3.0, 8.0], [6.0, 8.0]]
    assert sentence_embeddings(stream.half()).dtype == torch.float16


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (GPTConfig, {"task_head": "classification"}, ("last", 2, False, False, True)),
        (GPTConfig, {"task_head": "regression"}, ("last", 1, False, False, True)),
        (GPTConfig, {"task_head": "regression", "num_labels": 4}, ("last", 4, False, False, True)),
        (GPTConfig, {"task_head": "reward"}, ("last", 1, False, False, True)),
        (GPTConfig, {"task_head": "multiple_choice"}, ("last", 1, False, False, True)),
        (GPTConfig, {"task_head": "embedding"}, ("mean", 0, False, True, False)),
        (
            GPTConfig,
            {"task_head": "embedding", "normalize_embedding": False, "head_pooling": "first"},
            ("first", 0, False, False, False),
        ),
        (BertConfig, {"task_head": "classification"}, ("first", 2, True, False, True)),
        (
            BertConfig,
            {"task_head": "classification", "head_pooling": "last"},
            ("last", 2, True, False, True),
        ),
        (BertConfig, {"task_head": "embedding"}, ("mean", 0, False, True, False)),
    ],
)
def test_each_task_has_its_head(kind, fields, expected):
    (head,) = kind(**SIZES, **fields).heads().values()
    found = (head.pooling, head.outputs, head.has_pooler, head.normalizes, head.drops)
    assert found == expected


def test_a_number_of_labels_has_a_bound():
    assert GPTConfig(**SIZES, task_head="regression", num_labels=1_000_000).num_labels == 10**6
    with pytest.raises(ConfigError, match="num_labels is 1000001, more than 1000000"):
        GPTConfig(**SIZES, task_head="regression", num_labels=1_000_001)


def test_the_pooled_vector_is_dropped_as_the_first_token_of_site_8():
    model = GPT(
        GPTConfig(**SIZES, task_head="reward"), Placement(Mesh.single(), dtype=torch.float64)
    )
    tokens = torch.randint(61, (3, 5), generator=torch.Generator().manual_seed(1))
    key = DropoutKey.for_batch(seed=1, iteration=2, samples=torch.arange(3), positions=5)
    stream, found = model(tokens, dropout=Dropout(key, hidden=0.4))
    kept = keep_mask((1, 3, 24), 0.4, key.narrow(0, 1), layer=-1, site=8)[0]
    weight = model.sequence_head.out.weight
    expected = (stream[-1] * kept / 0.6) @ weight.t()
    assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-10)
    assert 0 < int(kept.sum()) < kept.numel()


def test_sites_of_dropout_have_the_numbers_of_the_table():
    """They are part of every training curve."""
    names = ("EMBEDDING", "ATTENTION_PROBABILITIES", "ATTENTION_OUTPUT", "MLP_OUTPUT")
    names += ("CROSS_ATTENTION_PROBABILITIES", "CROSS_ATTENTION_OUTPUT", "DECODER_EMBEDDING")
    names += ("ROUTER_INPUT", "SEQUENCE_HEAD")
    assert [getattr(dropout_sites, name) for name in names] == list(range(9))
    assert dropout_sites.EMBEDDING_LAYER == -1
