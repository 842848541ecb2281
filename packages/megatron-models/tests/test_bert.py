"""BERT on one rank: counted parameters, losses and heads."""

import math
from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import (
    Bert,
    BertConfig,
    ConfigError,
    EncoderOutput,
    LayerPass,
    Placement,
    SavedBytes,
    parameter_count,
    training_flops,
)
from megatron_parallel import Mesh, ParallelLayout
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 4,
}
POST: dict[str, Any] = {"norm_placement": "sum", "embedding_norm": True}


def built(**fields: Any) -> Bert:
    return Bert(BertConfig(**SMALL | fields), Placement(Mesh.single(), dtype=torch.float64))


def text(seed: int = 1, batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(*lengths: int, length: int = 12) -> Mask:
    """Returns the mask of texts with padding after these lengths."""
    ids = -(torch.arange(length) >= torch.tensor(lengths)[:, None]).int()
    return Mask(causal=False, document_ids=ids)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        POST,
        {"bert_binary_head": False},
        {"bert_binary_head": False, "bert_pooler": True, "masked_lm_head": False},
        {"num_tokentypes": 0, "position_embedding_type": "rope", "activation": "swiglu"},
        {"task_head": "classification", "num_labels": 5},
        {"task_head": "embedding"},
        {"task_head": "reward"},
    ],
)
def test_the_configuration_lists_the_parameters_of_the_model(fields: dict[str, Any]) -> None:
    model = built(**fields)
    listed = {
        name: spec.sharding.local_shape(model.mesh)
        for name, spec in model.config.parameters().items()
    }
    assert listed == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(listed) == [name for name, _ in model.named_parameters()]


def test_the_bias_of_the_logits_is_cut_like_the_output_matrix_and_does_not_decay() -> None:
    cut = BertConfig(**SMALL).parameters()["lm_head.bias"].sharding
    assert not cut.weight_decay
    assert cut.local_shape(Mesh(ParallelLayout(tp=2).resolve(2), 0)) == (32,)


def test_megatrons_bert_large_has_its_size() -> None:
    """Megatron-LM's recipe is called BERT 345m; its vocabulary is padded to 30,592 tokens."""
    sizes = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
    config = BertConfig(**sizes, vocab_size=30522, max_position_embeddings=512)
    layer = 12 * 1024**2 + 13 * 1024  # matrices; biases and two norms
    words, ends = 30592 * 1024, (512 + 2 + 2) * 1024  # positions, types, final norm
    heads = 2 * (1024**2 + 1024) + 2 * 1024 + 30592 + 2 * 1024 + 2
    assert parameter_count(config, padded=True) == 24 * layer + words + ends + heads
    assert 335e6 < parameter_count(config) < 345e6


def test_flops_are_those_that_torch_counts() -> None:
    model = built(max_position_embeddings=8, vocab_size=60)
    tokens = text(batch=5, length=8) % 60
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(tokens)
        (out.tokens.sum() + out.sequences.sum()).backward()
    assert training_flops(model.config, 8, 40) == counter.get_total_flops()


def test_losses_are_the_cross_entropy_of_the_logits() -> None:
    model, tokens, mask = built(**POST), text(), padded(12, 9, 5)
    labels = text(2).masked_fill(mask.document_ids < 0, -100)
    found = model(tokens, labels=labels, mask=mask)
    logits = model(tokens, mask=mask).tokens[..., :61].transpose(0, 1)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    torch.testing.assert_close(found.tokens.flatten(), expected, rtol=1e-12, atol=1e-12)
    assert isinstance(found, EncoderOutput)
    assert found.sequences.shape == (3, 2)


def test_padding_and_types_matter_as_they_should() -> None:
    model, tokens, mask = built(**POST), text(), padded(12, 9, 5)
    one = model(tokens, mask=mask)
    changed = tokens.where(mask.document_ids >= 0, (tokens + 7) % 61)
    two = model(changed, mask=mask)
    kept = (mask.document_ids >= 0).t()
    assert torch.equal(one.tokens[kept], two.tokens[kept])
    assert torch.equal(one.sequences, two.sequences)
    types = torch.zeros_like(tokens)
    assert torch.equal(model(tokens, mask=mask, token_types=types).tokens, one.tokens)
    types[:, 4:] = 1
    assert not torch.equal(model(tokens, mask=mask, token_types=types).tokens, one.tokens)
    # Tokens read later ones.
    tokens[0, -1] = (tokens[0, -1] + 1) % 61
    assert not torch.equal(model(tokens, mask=mask).tokens[0, 0], one.tokens[0, 0])


def test_positions_start_at_the_offset() -> None:
    model, tokens = built(position_offset=2), text()
    table = model.embedding.position.weight
    with torch.no_grad():
        before = model(tokens).tokens
        table[:2] += 1.0
        assert torch.equal(model(tokens).tokens, before)
        given = torch.arange(12).expand(3, -1)
        torch.testing.assert_close(model(tokens, positions=given).tokens, before, rtol=0, atol=0)
        table[2] += 1.0
        assert not torch.equal(model(tokens).tokens, before)
    with pytest.raises(
        ConfigError, match="15 tokens is longer than max_position_embeddings 16 less"
    ):
        model(text(length=15))


def test_positions_types_and_norm_are_partial_where_the_sequence_is_cut() -> None:
    spec = BertConfig(**SMALL | POST).trunk().embedding
    for cut, partial in ((False, None), (True, "tp")):
        found = {name: each.sharding.partial for name, each in spec.parameters(cut).items()}
        names = ("position.weight", "token_types.weight", "norm.weight", "norm.bias")
        assert found == {"word.weight": None, **dict.fromkeys(names, partial)}


@pytest.mark.parametrize(
    ("fields", "of_token"),
    [
        ({}, 2 * 8),  # tokens and their types
        ({"num_tokentypes": 0}, 8),
        (POST, 2 * 8 + 24 * 4 + 2 * 4),  # input and two statistics of the norm
        ({"num_tokentypes": 0, **POST}, 8 + 24 * 4 + 2 * 4),
    ],
)
def test_the_embedding_saves_tokens_types_and_what_its_norm_reads(fields, of_token) -> None:
    spec = BertConfig(**SMALL | fields).trunk().embedding
    assert spec.activation_bytes(LayerPass(8, 3, SavedBytes(4))) == 8 * 3 * of_token


def test_stages_together_are_the_whole_encoder() -> None:
    model, tokens, mask = built(**POST), text(), padded(12, 9, 5)
    types, labels = tokens % 2, text(2)
    first, last = (
        Bert(
            model.config,
            Placement(Mesh(ParallelLayout(pp=2).resolve(2), rank), dtype=torch.float64),
        )
        for rank in range(2)
    )
    assert first.lm_head is None and first.sequence_head is None
    x = first(tokens, token_types=types, labels=labels, mask=mask)
    for given in ({}, {"labels": labels}, {"logits_at": tokens[:, :2] % 12}):
        found = last(x, mask=mask, **given)
        expected = model(tokens, token_types=types, mask=mask, **given)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.sequences, expected.sequences)
    with pytest.raises(ConfigError, match="labels and logits_at exclude each other"):
        last(x, mask=mask, labels=labels, logits_at=tokens[:, :2] % 12)


def test_layers_communicate_in_slices_on_request_alone() -> None:
    mesh = Mesh(ParallelLayout(tp=2).resolve(2), 0)
    for overlap in (False, True):
        placement = Placement(mesh, sequence_parallel=True, tp_comm_overlap=overlap)
        model = Bert(BertConfig(**SMALL), placement)
        assert (model.num_slices > 1) == overlap and model.num_slices >= 1
        assert model.layers["1"].mlp.up.num_slices == model.num_slices


def test_a_causal_mask_and_labels_without_logits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"use Mask\(causal=False\)"):
        built()(text(), mask=Mask())
    with pytest.raises(ConfigError, match="has no logits"):
        built(task_head="classification")(text(), labels=text())
    with pytest.raises(ConfigError, match="has no logits"):
        built(task_head="classification")(text(), logits_at=text() * 0)
    with pytest.raises(ConfigError, match="no token types"):
        built(num_tokentypes=0)(text(), token_types=text() * 0)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_heads_read_the_tokens_of_their_pooling(pooling: str) -> None:
    model = built(task_head="embedding", head_pooling=pooling)
    lengths = (12, 9, 5)
    stream, found = model(text(), mask=padded(*lengths))
    for number, length in enumerate(lengths):
        states = stream[:length, number]
        vector = {"first": states[0], "last": states[-1], "mean": states.mean(0)}[pooling]
        expected = vector / vector.norm()
        torch.testing.assert_close(found[number], expected, rtol=1e-12, atol=1e-12)


def test_initial_losses_are_those_of_guesses() -> None:
    model = built()
    found = model(text(), labels=text(3)).tokens.detach().mean()
    assert math.isclose(float(found), math.log(61), rel_tol=0.05)
