from dataclasses import replace

import pytest
import torch
from megatron_kernels import Mask
from megatron_models.cache import StaticKVCache
from megatron_models.components.attention.span import EVERYTHING
from megatron_models.components.embedding.output import mask_padding_logits
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.model import GPT
from megatron_models.parameters import parameter_count, parameter_shapes
from megatron_models.placement import Placement
from megatron_parallel import (
    Mesh,
    ParallelLayout,
    collect_shardings,
    initialize_parameters,
    parameter_views,
)

pytestmark = pytest.mark.sampled(2)


@pytest.fixture
def mesh():
    return Mesh.single()


@pytest.fixture
def model(config, mesh, scramble):
    return scramble(GPT(config, Placement(mesh, dtype=torch.float64)))


def draw(config, *shape, seed=1):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def test_shapes_and_dtypes(config, mesh):
    model = GPT(config, Placement(mesh, dtype=torch.bfloat16))
    tokens = draw(config, 3, 7)
    assert model(tokens).shape == (7, 3, config.padded_vocab_size)
    loss = model.loss(tokens, tokens)
    assert loss.shape == (3, 7)
    assert loss.dtype == torch.float32


def test_planned_counts_and_shapes_equal_those_of_the_built_model(config, mesh):
    model = GPT(config, mesh)
    table = collect_shardings(model)
    assert {name: sharding.shape for name, sharding in table.items()} == parameter_shapes(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(config, padded=True) == built
    padding = config.padded_vocab_size - config.vocab_size
    copies = 1 + config.untie_embeddings_and_output_weights
    assert parameter_count(config) == built - copies * padding * config.hidden_size


def test_weight_decay_is_for_matrices_only(config, mesh):
    for name, sharding in collect_shardings(GPT(config, mesh)).items():
        vector = name.endswith(("bias", "A_log")) or "norm" in name
        assert sharding.weight_decay == (not vector), name


def test_initial_weights_follow_the_configuration_and_the_seed(small, mesh):
    config = small(hidden_size=128, vocab_size=640, ffn_hidden_size=512, init_method_std=0.05)
    weights = dict(GPT(config, mesh, seed=1).named_parameters())
    for name, parameter in weights.items():
        if "norm.weight" in name:
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            output = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.05 / 2 if output else 0.05  # sqrt(2 * 2 layers) = 2
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    same, other = GPT(config, mesh, seed=1), GPT(config, mesh, seed=2)
    qkv = "layers.1.attention.qkv.weight"
    assert torch.equal(same.get_parameter(qkv), weights[qkv])
    assert not torch.equal(other.get_parameter(qkv), weights[qkv])
    assert not torch.equal(weights["layers.0.attention.qkv.weight"], weights[qkv])


def test_a_deeper_model_starts_with_the_same_embedding(small, mesh):
    word = "embedding.word.weight"
    shallow, deep = GPT(small(), mesh), GPT(small(num_layers=5), mesh)
    assert torch.equal(shallow.get_parameter(word), deep.get_parameter(word))


def test_a_model_built_on_the_meta_device_is_initialized_later(config, mesh):
    late = GPT(config, Placement(mesh, device="meta")).to_empty(device="cpu")
    late.initialize(1234)
    tokens = draw(config, 1, 5)
    assert torch.equal(late(tokens), GPT(config, mesh)(tokens))


def test_default_initialization_is_that_of_the_sharding_table(small, mesh):
    one, two = GPT(small(), mesh, seed=7), GPT(small(), mesh, seed=8)
    initialize_parameters(two, seed=7, mesh=mesh)
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_decoding_with_a_cache_equals_the_whole_sequence(model):
    config = model.config
    tokens = draw(config, 2, 12)
    whole = model(tokens)
    cache = StaticKVCache(config, model.mesh, 2, 12, dtype=torch.float64)
    with torch.no_grad():
        steps = [model(tokens[:, :5], cache=cache)]
        steps += [model(tokens[:, i : i + 1], cache=cache) for i in range(5, 10)]
        steps.append(model(tokens[:, 10:], cache=cache))
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(steps), whole, rtol=0, atol=1e-12)


def test_logits_are_computed_only_where_requested(model, monkeypatch):
    made = []
    output = GPT._output

    def watched(self):
        layer = output(self)
        return lambda x, **given: made.append(layer(x, **given)) or made[-1]

    monkeypatch.setattr(GPT, "_output", watched)
    tokens = draw(model.config, 2, 9)
    indices = torch.tensor([[8, 0, 3], [2, 2, 5]])
    with torch.no_grad():
        whole = model(tokens)
        some = model(tokens, logits_at=indices)
    for row in range(2):
        torch.testing.assert_close(some[:, row], whole[indices[row], row], rtol=0, atol=1e-13)
    assert [each.numel() for each in made] == [whole.numel(), some.numel()]
    assert some.shape == (3, 2, model.config.padded_vocab_size)
    with pytest.raises(ConfigError, match="labels and logits_at exclude each other"):
        model(tokens, labels=tokens, logits_at=indices)


def test_a_truncated_cache_continues_from_the_truncation(model):
    tokens = draw(model.config, 1, 8)
    cache = StaticKVCache(model.config, model.mesh, 1, 8, dtype=torch.float64)
    with torch.no_grad():
        model(draw(model.config, 1, 8, seed=2), cache=cache)
        cache.truncate(0)
        model(tokens[:, :6], cache=cache)
        if model.recurrent:
            with pytest.raises(
                ConfigError, match="stands for 6 tokens and cannot be cut back to 3"
            ):
                cache.truncate(3)
            return
        cache.truncate(3)
        rest = model(tokens[:, 3:], cache=cache)
        torch.testing.assert_close(rest, model(tokens)[3:], rtol=0, atol=1e-12)


def test_cached_sequences_of_different_lengths_are_padded_on_the_left(model):
    """-1 in the mask hides the padding; positions count tokens without padding."""
    long, short = draw(model.config, 1, 6), draw(model.config, 1, 4, seed=2)
    rows = torch.cat([long, torch.cat([long[:, :2] * 0, short], 1)])
    documents = torch.tensor([[0] * 6, [-1, -1, 0, 0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]], dtype=torch.int32)
    mask = Mask(document_ids=documents, positions=positions)
    cache = StaticKVCache(model.config, model.mesh, 2, 6, dtype=torch.float64)
    with torch.no_grad():
        model(rows[:, :5], mask=mask, cache=cache)
        last = model(rows[:, 5:], mask=mask, cache=cache)[0]
        torch.testing.assert_close(last[0], model(long)[-1, 0], rtol=0, atol=1e-12)
        torch.testing.assert_close(last[1], model(short)[-1, 0], rtol=0, atol=1e-12)
        if model.config.span != EVERYTHING or model.config.has_alibi or model.recurrent:
            return  # windows and biases need the position of every key; states are not cut back
        cache.truncate(5)
        blank = torch.cat(
            [positions[:, :5], positions[:, :1]], 1
        )  # without the last key's position
        own = replace(mask, positions=blank, query_positions=positions[:, 5:])
        assert torch.equal(model(rows[:, 5:], mask=own, cache=cache)[0], last)


def test_packed_documents_equal_separate_documents(model):
    config = model.config
    lengths = [5, 1, 7]
    documents = [draw(config, 1, n, seed=n) for n in lengths]
    packed = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].int()
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
    mask = Mask(document_ids=numbers)
    separate = torch.cat([model.loss(document, document) for document in documents], 1)
    if not config.attention_chunk_size:  # chunks begin where the mask's positions do
        together = model.loss(packed, packed, positions=positions, mask=mask)
        torch.testing.assert_close(together, separate, rtol=0, atol=1e-12)

    from_mask = model.loss(packed, packed, mask=Mask(document_ids=numbers, positions=positions))
    torch.testing.assert_close(from_mask, separate, rtol=0, atol=1e-12)
    assert (model.loss(packed, packed, positions=positions) - separate).abs().max() > 1e-3


def test_padding_is_not_attended_to_and_has_no_gradient(model):
    config = model.config
    tokens = draw(config, 1, 9)
    numbers = torch.tensor([[0] * 6 + [-1] * 3], dtype=torch.int32)
    other = tokens.clone()
    other[:, 6:] = (other[:, 6:] + 1) % config.vocab_size
    mask = Mask(document_ids=numbers)
    assert torch.equal(model(tokens, mask=mask)[:6], model(other, mask=mask)[:6])
    model.loss(tokens, tokens, mask=mask)[:, :6].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_padding_tokens_get_no_probability_and_no_gradient(model):
    config = model.config
    tokens = draw(config, 2, 6)
    logits = model(tokens)
    assert (logits[..., config.vocab_size :] == -torch.inf).all()
    assert logits[..., : config.vocab_size].isfinite().all()
    loss = model.loss(tokens, tokens)
    torch.testing.assert_close(
        torch.exp(-loss),
        logits.softmax(-1).gather(-1, tokens.t()[..., None])[..., 0].t(),
        rtol=0,
        atol=1e-12,
    )
    (loss.sum() + logits[..., : config.vocab_size].square().sum()).backward()
    for name in ("embedding.word.weight", "output.weight"):
        if name in dict(model.named_parameters()):
            grad = model.get_parameter(name).grad
            assert (grad[config.vocab_size :] == 0).all()
            assert (grad[: config.vocab_size] != 0).any()


def test_each_rank_masks_its_columns_of_padding():
    axes = [Mesh(ParallelLayout(tp=4, dp=1), rank).axis("tp") for rank in range(4)]
    columns = {5: [4, 1, 0, 0], 8: [4, 4, 0, 0], 9: [4, 4, 1, 0], 16: [4, 4, 4, 4]}
    for vocab, left in columns.items():
        for axis, count in zip(axes, left, strict=True):
            found = mask_padding_logits(torch.zeros(2, 1, 4), axis, vocab)
            expected = [0.0] * count + [-torch.inf] * (4 - count)
            assert found.flatten(0, 1).tolist() == [expected] * 2


def test_the_factor_of_embeddings_is_rounded_as_the_model_is(small, mesh):
    """In bfloat16 the square root of 3072 is 55.5, not 55.426."""
    factors = {"embedding_multiplier": 3072**0.5, "position_embedding_type": "none"}
    for dtype, factor in ((torch.bfloat16, 55.5), (torch.float64, 3072**0.5)):
        model = GPT(small(**factors, num_layers=1), Placement(mesh, dtype=dtype))
        tokens = torch.arange(6).view(2, 3)
        expected = model.embedding.word.weight[tokens.t()] * factor
        assert torch.equal(model.embedding(tokens, None, 0), expected)


def test_the_gradient_of_a_tied_weight_is_the_sum_of_its_two_uses(small, mesh, scramble):
    tied = scramble(GPT(small(), Placement(mesh, dtype=torch.float64)))
    untied = GPT(
        small(untie_embeddings_and_output_weights=True), Placement(mesh, dtype=torch.float64)
    )
    values = tied.state_dict()
    untied.load_state_dict(values | {"output.weight": values["embedding.word.weight"]})
    tokens, labels = draw(tied.config, 2, 8), draw(tied.config, 2, 8, seed=2)
    for model in (tied, untied):
        model.loss(tokens, labels).mean().backward()
    word = "embedding.word.weight"
    uses = untied.get_parameter(word).grad + untied.get_parameter("output.weight").grad
    torch.testing.assert_close(tied.get_parameter(word).grad, uses, rtol=0, atol=1e-14)


def test_labels_without_loss_have_no_effect(model):
    tokens = draw(model.config, 1, 6)
    labels = tokens.clone()
    labels[:, 2] = -100
    loss = model.loss(tokens, labels)
    assert loss[0, 2] == 0
    assert (loss[0, [0, 1, 3, 4, 5]] > 0).all()


def test_a_sequence_longer_than_the_positions_is_refused(model):
    with pytest.raises(ConfigError, match=r"17 tokens .* 16"):
        model(draw(model.config, 1, 17))
    cache = StaticKVCache(model.config, model.mesh, 1, 8, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(ConfigError, match=r"9 positions .* 8"):
        model(draw(model.config, 1, 9), cache=cache)
    with pytest.raises(ConfigError, match=r"17 tokens .* 16"):
        StaticKVCache(model.config, model.mesh, 1, 17)


def test_initial_weights_do_not_depend_on_the_layout(small, mesh):
    config = small(activation="swiglu", untie_embeddings_and_output_weights=True, vocab_size=150)
    whole = dict(GPT(config, mesh).named_parameters())
    for rank in range(2):
        part = Mesh(ParallelLayout(tp=2).resolve(2), rank)
        model = GPT(config, part)
        views = parameter_views(model, collect_shardings(model), part)
        for name, pieces in views.items():
            for view in pieces:
                box = (slice(o, o + n) for o, n in zip(view.offsets, view.lengths, strict=True))
                assert torch.equal(view.tensor, whole[name][tuple(box)]), name
        assert model.output.weight.shape == (128, config.hidden_size)
