"""The cache of fixed size: its layers, its room and its length, by hand."""

import dataclasses

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import ConfigError, GPTConfig, KVSpec
from megatron_models.cache import DenseKV, LatentKV, StaticKVCache
from megatron_parallel import Mesh

CONFIG = GPTConfig(
    num_layers=3,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=20,
    max_position_embeddings=16,
)


class SecondLayerOnly(GPTConfig):
    """A model of three layers, of which only the second caches keys and values."""

    def cached(self, tp):
        return {1: KVSpec(2, 4, 4)}


class LatentKeys(GPTConfig):
    """A model whose layers cache keys of 6 channels that hold the values."""

    def cached(self, tp):
        return dict.fromkeys(range(3), KVSpec(1, 6, 4, values_in_keys=True))


def made(kind, **options):
    config = kind(**{field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(kind)})
    return StaticKVCache(config, Mesh.single(), 2, 8, **options)


def drawn(tokens, groups=2, channels=2):
    return torch.randn(tokens, 2, groups, channels)


def test_the_length_is_that_of_the_layer_that_has_seen_least() -> None:
    cache = made(GPTConfig)
    assert (cache.length, cache.max_length) == (0, 8)
    for layer, tokens in ((0, 5), (1, 5), (2, 3)):
        cache.update(layer, drawn(tokens), drawn(tokens))
    assert cache.length == 3
    cache.update(2, drawn(2), drawn(2))
    assert cache.length == 5


def test_keys_and_values_of_each_layer_come_back_in_order() -> None:
    cache = made(GPTConfig)
    parts = [(drawn(3), drawn(3)), (drawn(1), drawn(1))]
    other = (drawn(3), drawn(3))
    first = cache.update(0, *parts[0])
    cache.update(1, *other)
    both = cache.update(0, *parts[1])
    assert torch.equal(first.k, parts[0][0]) and torch.equal(first.v, parts[0][1])
    assert torch.equal(both.k, torch.cat([parts[0][0], parts[1][0]]))
    assert torch.equal(both.v, torch.cat([parts[0][1], parts[1][1]]))
    assert both.k.dtype == torch.float32


def test_a_cache_takes_as_many_tokens_as_it_has_positions() -> None:
    cache = made(GPTConfig)
    cache.update(0, drawn(8), drawn(8))
    with pytest.raises(ConfigError, match=r"9 positions do not fit in a cache of 8; increase"):
        cache.update(0, drawn(1), drawn(1))
    assert len(cache.update(1, drawn(8), drawn(8)).k) == 8


def test_positions_after_a_cut_are_written_again() -> None:
    cache = made(GPTConfig)
    old, new = drawn(6), drawn(2)
    for layer in range(3):
        cache.update(layer, old, old)
    cache.truncate(7)
    assert cache.length == 6
    cache.truncate(4)
    assert cache.length == 4
    assert torch.equal(cache.update(1, new, new).v, torch.cat([old[:4], new]))


def test_only_an_emptied_cache_forgets_the_encoder() -> None:
    cache = made(GPTConfig)
    with pytest.raises(ConfigError, match=r"layer 1 attends to an encoder's output that the cache"):
        cache.encoder_kv(1, None)
    k, v = drawn(5), drawn(5)
    assert cache.encoder_kv(1, (k, v)).k is k
    cache.truncate(1)
    kept = cache.encoder_kv(1, None)
    assert kept.k is k and kept.v is v
    cache.truncate(0)
    with pytest.raises(ConfigError, match="layer 1"):
        cache.encoder_kv(1, None)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "a cache needs at least one layer"),
        ([0, 3], "the model has no layer 3; use layers of"),
        ([-1], "the model has no layer -1; use layers of"),
    ],
)
def test_layers_that_the_model_lacks_are_refused(layers, message) -> None:
    with pytest.raises(ConfigError, match=message):
        made(GPTConfig, layers=layers)


def test_layers_that_cache_nothing_are_skipped_unless_all_do() -> None:
    for layers in (None, [0, 1, 2]):
        cache = made(SecondLayerOnly, layers=layers)
        k = drawn(2, channels=4)
        cache.update(1, k, k)
        assert cache.length == 2
    with pytest.raises(ConfigError, match=r"layer 2 caches nothing; use layers of \[1\]"):
        made(SecondLayerOnly, layers=[2, 0])


def test_a_cache_of_some_layers_counts_these_alone() -> None:
    cache = made(GPTConfig, layers=[2])
    cache.update(2, drawn(4), drawn(4))
    assert cache.length == 4
    with pytest.raises(KeyError):
        cache.update(0, drawn(1), drawn(1))


def test_latent_keys_are_their_own_values() -> None:
    cache = made(LatentKeys, dtype=torch.float64)
    k = torch.randn(3, 2, 1, 6, dtype=torch.float64)
    cache.update_latent(0, k[:2], 4)
    handle = cache.update_latent(0, k[2:], 4)
    assert isinstance(handle, LatentKV) and torch.equal(handle.k, k)
    q = torch.randn(3, 2, 2, 6, dtype=torch.float64)
    y = handle.attend(q, Mask())
    scores = torch.einsum("sbnd,tbd->bnst", q, k[:, :, 0]) / 6**0.5
    scores = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bnst,tbd->sbnd", scores.softmax(-1), k[:, :, 0, :4])
    torch.testing.assert_close(y, expected)


def test_a_query_offset_places_new_tokens_after_the_stored_ones() -> None:
    k, v = torch.randn(4, 1, 1, 2).double(), torch.randn(4, 1, 1, 2).double()
    q = torch.randn(1, 1, 1, 2).double()
    y = DenseKV(k, v).attend(q, Mask(), query_offset=2)
    weights = (k[:3, 0, 0] @ q[0, 0, 0] / 2**0.5).softmax(0)
    torch.testing.assert_close(y[0, 0, 0], weights @ v[:3, 0, 0])
    first = DenseKV(k, v).attend(q, Mask())  # by default the first token, which sees itself alone
    torch.testing.assert_close(first[0, 0, 0], v[0, 0, 0])


def test_handles_are_compared_by_identity() -> None:
    """Tensors have no single truth value."""
    for handle in (DenseKV(drawn(1), drawn(1)), LatentKV(drawn(1), 2)):
        assert handle == handle and dataclasses.replace(handle) != handle


def test_memory_is_on_the_chosen_device() -> None:
    cache, k = made(GPTConfig, device="meta"), drawn(3).to("meta")
    assert cache.update(0, k, k).k.device.type == "meta"
    assert made(GPTConfig).update(0, drawn(3), drawn(3)).v.device.type == "cpu"
