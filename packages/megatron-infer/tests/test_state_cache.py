"""The slots of recurrent states."""

import torch
from megatron_infer.engine.cache import SlotCache
from megatron_models import StateCache

CPU = torch.device("cpu")


def test_each_sequence_has_its_state_and_starts_from_zero() -> None:
    cache = SlotCache(3, 8, device=CPU)
    assert isinstance(cache, StateCache)
    cache.begin_pass([2, 0], [0, 0])
    assert cache.read_state(4) is None
    cache.write_state(4, {"sum": torch.tensor([[2.0], [5.0]])}, 3)
    cache.begin_pass([0, 1, 2], [3, 0, 3])
    found = cache.read_state(4)
    assert found is not None and found["sum"].flatten().tolist() == [5.0, 0.0, 2.0]
    for starts, states in (([0, 1], [0.0, 2.0]), ([1, 0], [5.0, 0.0])):
        cache.begin_pass([0, 2], starts)  # another sequence in one of the slots
        found = cache.read_state(4)
        assert found is not None and found["sum"].flatten().tolist() == states
    cache.begin_pass([0], [0])
    assert cache.read_state(4) is None
    assert cache.recurrent_layers == (4,)


def test_layers_are_those_with_keys_of_the_sequence_and_not_of_a_source() -> None:
    cache = SlotCache(1, 8, max_source=4, device=CPU)
    k = torch.ones(2, 1, 1, 4)
    cache.encoder_kv(2, (k, k))
    assert cache.layers == ()
    cache.update_latent(5, k, 3)
    cache.update(1, k, k)
    assert cache.layers == (1, 5)
