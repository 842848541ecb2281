"""The slots of recurrent states, of latent keys and of sources."""

import pytest
import torch
from megatron_infer.engine.cache import SlotCache
from megatron_models import DenseKV, StateCache

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


def numbered(tokens: int, rows: int, first: int) -> torch.Tensor:
    """Returns keys ``[t, b, 1, 2]`` that differ for all tokens and rows."""
    return (first + torch.arange(tokens * rows * 2.0)).view(tokens, rows, 1, 2)


def test_a_new_cache_begins_all_sequences_and_has_no_room_for_sources() -> None:
    cache = SlotCache(2, 8, device=CPU)
    assert cache.length == 0 and cache.layers == cache.recurrent_layers == ()
    assert cache.read_state(0) is None
    k = numbered(3, 2, 0)
    assert isinstance(cache.update(0, k, k), DenseKV)
    cache.encoder_kv(0, (k[:0], k[:0]))
    assert cache.encoder_kv(0, None).k.shape == (0, 2, 1, 2)


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0], [1]])
def test_latent_keys_are_those_of_the_sequences_in_the_order_of_the_pass(slots: list[int]) -> None:
    cache, k = SlotCache(3, 8, device=CPU), numbered(5, 3, 100)
    starts = [(4, 2, 3)[slot] for slot in slots]
    for slot, length in enumerate((4, 2, 3)):
        cache.begin_pass([slot], [0])
        cache.update_latent(7, k[:length, [slot]], 1)
    cache.begin_pass(slots, starts)
    new = numbered(2, len(slots), 0)
    found = cache.update_latent(7, new, 1).k
    assert found.shape == (max(starts) + 2, len(slots), 1, 2)
    for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        expected = torch.cat([k[:start, slot], new[:, row]])
        assert torch.equal(found[: start + 2, row], expected)


def test_layers_may_get_different_numbers_of_new_tokens() -> None:
    cache = SlotCache(2, 8, device=CPU)
    k = numbered(3, 2, 1)
    cache.begin_pass([0, 1], [0, 0])
    assert torch.equal(cache.update_latent(0, k, 1).k, k)
    assert torch.equal(cache.update_latent(1, k[:2], 1).k, k[:2])


def test_keys_of_a_source_are_those_of_the_sequences_in_the_order_of_the_pass() -> None:
    cache, k = SlotCache(3, 8, max_source=4, device=CPU), numbered(3, 3, 1)
    for slots, length in (([2, 0], 3), ([1], 2)):
        cache.begin_pass(slots, [0] * len(slots))
        given = k[:length, slots], -k[:length, slots]
        assert torch.equal(cache.encoder_kv(5, given).v, given[1])
    for slots in ([0, 1, 2], [1, 2], [2, 1, 0], [1]):
        cache.begin_pass(slots, [3] * len(slots))
        found = cache.encoder_kv(5, None)
        assert found.k.shape == (4, len(slots), 1, 2)
        for row, slot in enumerate(slots):
            length = 2 if slot == 1 else 3
            assert torch.equal(found.k[:length, row], k[:length, slot])
            assert torch.equal(found.v[:length, row], -k[:length, slot])
