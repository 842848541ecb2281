import pytest
import torch
from megatron_kernels import bias_dropout_add
from megatron_models.cache import StaticKVCache
from megatron_models.components.dropout import Dropout, ProbabilityDropout, StageDropout
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.model import GPT
from megatron_models.placement import Placement
from megatron_parallel import DropoutKey, LayoutError, Mesh


@pytest.fixture
def model(small, scramble):
    return scramble(GPT(small(), Placement(Mesh.single(), dtype=torch.float64)))


@pytest.fixture
def tokens(small):
    return torch.randint(small().vocab_size, (3, 8), generator=torch.Generator().manual_seed(1))


def key(samples=(0, 1, 2), iteration=1, positions=8):
    numbers = torch.tensor(samples)
    return DropoutKey.for_batch(seed=1, iteration=iteration, samples=numbers, positions=positions)


def test_the_same_key_drops_the_same_and_another_iteration_something_else(model, tokens):
    dropout = Dropout(key(), hidden=0.1, attention=0.1)
    once = model.loss(tokens, tokens, dropout=dropout)
    assert torch.equal(model.loss(tokens, tokens, dropout=Dropout(key(), 0.1, 0.1)), once)
    other = model.loss(tokens, tokens, dropout=Dropout(key(iteration=2), 0.1, 0.1))
    assert (other != once).all()


def test_a_sample_has_the_same_mask_in_every_batch(model, tokens):
    whole = model.loss(tokens, tokens, dropout=Dropout(key(), 0.1, 0.1))
    order = [2, 0]
    part = model.loss(tokens[order], tokens[order], dropout=Dropout(key((2, 0)), 0.1, 0.1))
    torch.testing.assert_close(part, whole[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("hidden", "attention"), [(0.2, 0.0), (0.0, 0.2)])
def test_each_rate_has_an_effect_and_without_rates_nothing_is_dropped(
    model, tokens, hidden, attention
):
    plain = model.loss(tokens, tokens)
    assert torch.equal(model.loss(tokens, tokens, dropout=Dropout(key())), plain)
    dropped = model.loss(tokens, tokens, dropout=Dropout(key(), hidden, attention))
    later = slice(1, None)  # the first token attends only to itself
    assert (dropped[:, later] != plain[:, later]).all()
    assert torch.equal(model.train().loss(tokens, tokens), model.eval().loss(tokens, tokens))


def test_the_mean_over_many_masks_is_the_embedding(small, scramble):
    """Embedding dropout alone, observed at the first block's input: scaling preserves the mean."""
    model = scramble(GPT(small(), Placement(Mesh.single(), dtype=torch.float64)))
    seen = []
    model.layers["0"].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    tokens = torch.zeros(2000, 2, dtype=torch.int64)
    samples = torch.arange(2000)
    batch = DropoutKey.for_batch(seed=1, iteration=1, samples=samples, positions=2)
    with torch.no_grad():
        model(tokens, dropout=Dropout(batch, hidden=0.25))
        model(tokens[:1])
    dropped, plain = seen
    share = (dropped == 0).double().mean()
    assert 0.24 < share < 0.26
    torch.testing.assert_close(dropped.mean(1), plain[:, 0], rtol=0, atol=0.06)


@pytest.mark.parametrize("rates", [(1.0, 0.0), (0.0, 1.0), (-0.1, 0.0), (0.0, float("nan"))])
def test_a_rate_out_of_range_is_refused_by_name(rates):
    name = "hidden" if rates[1] == 0.0 else "attention"
    with pytest.raises(ConfigError, match=f"{name} dropout .* is not in 0 <= p < 1"):
        Dropout(key(), *rates)


def test_a_key_of_another_batch_and_dropout_while_decoding_are_refused(model, tokens):
    with pytest.raises(LayoutError, match=r"\(8, 3, 24\) with a key for \(8, 2\)"):
        model(tokens, dropout=Dropout(key((1, 2)), 0.1))
    cache = StaticKVCache(model.config, model.mesh, 3, 8, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(ConfigError, match="decoding has no dropout"):
        model(tokens, dropout=Dropout(key(), 0.1), cache=cache)


ROWS = torch.tensor([[0, 3, 4, 7], [1, 2, 5, 6], [4, 5, 6, 7]])


@pytest.mark.parametrize("length", [None, 16])
@pytest.mark.parametrize("queries", [None, ROWS[:1], ROWS], ids=["", "queries", "own queries"])
@pytest.mark.parametrize("keys", [None, ROWS[1:2], ROWS.flip(0)], ids=["", "keys", "own keys"])
@pytest.mark.parametrize("several", [False, True])
def test_a_part_of_the_probabilities_drops_the_same_as_the_whole(several, keys, queries, length):
    indices = torch.arange(8).flip(0).repeat(3, 1) * 2 if several else None
    dropout = Dropout(key(), 0.0, 0.4, indices, length)
    stage = StageDropout.from_dropout(dropout, None)
    of_layer = ProbabilityDropout(stage, 5, 6, query_indices=queries, key_indices=keys)
    shape = (3, 4, 8 if queries is None else 4, 8 if keys is None else 4)
    whole = of_layer(torch.ones(shape, dtype=torch.float64)) == 0
    assert 0.2 < whole.double().mean() < 0.6
    for sample in range(3):
        heads, rows, columns = slice(1, 3), slice(1, 4), slice(0, 3)
        part = of_layer.kept(slice(sample, sample + 1), heads, shape[3])(rows, columns)
        assert torch.equal(part[0], 1 - whole[sample, heads, rows, columns].int())
    numbers = of_layer.hash_numbers(shape[3])
    columns = torch.arange(shape[3])[None] if numbers.columns is None else numbers.columns
    heads = torch.arange(4)[:, None] + numbers.first_head
    for sample in range(3):  # the elements of a query are a row of `bias_dropout_add`
        own = heads * numbers.length + columns[sample if len(columns) > 1 else 0]
        row = torch.zeros(shape[2], 1, int(own.max()) + 1, dtype=torch.float64)
        words = (word[:, sample : sample + 1] for word in (numbers.word0, numbers.word1))
        dropped = bias_dropout_add(row + 1, None, row, *words, numbers.site) == 0
        assert torch.equal(dropped[:, 0][:, own].transpose(0, 1), whole[sample])
