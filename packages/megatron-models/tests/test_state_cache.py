"""The state of recurrent layers in the cache of fixed size."""

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import ConfigError, GPTConfig, KVSpec, StateCache, StateSpec, StateTensor
from megatron_models.cache import StaticKVCache
from megatron_models.components.context import Context
from megatron_models.components.recurrent_state import read_state, write_state
from megatron_parallel import Mesh

SPEC = StateSpec((("conv", StateTensor((3, 4))), ("sum", StateTensor((2,), precise=True))))


class Hybrid(GPTConfig):
    """A model whose first layer is recurrent."""

    def cached(self, tp):
        return {0: SPEC, 1: KVSpec(2, 4, 4)}


@pytest.fixture
def cache():
    config = Hybrid(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=20,
        max_position_embeddings=16,
    )
    return StaticKVCache(config, Mesh.single(), 2, 8, torch.bfloat16)


class KeysOnly:
    """A cache for attention."""

    length = 0

    def update(self, layer, k, v):
        raise AssertionError("a recurrent layer stores no keys")


def state(value):
    return {"conv": torch.full((2, 3, 4), value).bfloat16(), "sum": torch.full((2, 2), value)}


def test_a_state_is_stored_in_its_dtype_and_counts_tokens(cache):
    assert isinstance(cache, StateCache) and cache.read_state(0) is None
    cache.write_state(0, state(1.001), 5)
    cache.update(1, torch.zeros(5, 2, 2, 4), torch.zeros(5, 2, 2, 4))
    found = cache.read_state(0)
    assert cache.length == 5
    assert found["conv"].dtype == torch.bfloat16 and found["sum"].dtype == torch.float32
    assert torch.equal(found["sum"], torch.full((2, 2), 1.001))
    with pytest.raises(ConfigError, match="9 positions do not fit in a cache of 8"):
        cache.write_state(0, state(2.0), 4)


def test_a_state_cannot_be_cut_back(cache):
    cache.write_state(0, state(1.0), 5)
    for length in (1, 4):
        message = f"stands for 5 tokens and cannot be cut back to {length}"
        with pytest.raises(ConfigError, match=message):
            cache.truncate(length)
    for enough in (5, 6):
        cache.truncate(enough)
        assert torch.equal(cache.read_state(0)["sum"], torch.ones(2, 2))
    cache.truncate(0)
    assert cache.read_state(0) is None


def test_a_new_document_starts_without_the_state(cache):
    context = Context(Mask(), cache=cache, continues=torch.tensor([False, True]))
    assert read_state(context, 0) is None
    write_state(context, 0, state(3.0), 1)
    found = read_state(context, 0)
    assert not found["conv"][0].any() and bool((found["conv"][1] == 3).all())
    assert found["sum"].tolist() == [[0.0, 0.0], [3.0, 3.0]]


def test_a_cache_without_states_is_refused():
    with pytest.raises(ConfigError, match="layer 3 is recurrent and needs a cache that stores"):
        write_state(Context(Mask(), cache=KeysOnly()), 3, {}, 1)
